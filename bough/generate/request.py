"""One request for generation, in token ids, as every API and the library hand it down, and its randomness.

Randomness goes by position: the same (seed, choice, index) always gives the same number. No state is kept between draws, so
the result does not depend on other requests, their order, or the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from bough.types import Boundary, SamplingParams

_MOST_TOKENS, _LEAST_TOKENS = 8_192, 256  # of an answer without a limit
_BITS = 53  # as many as a float holds exactly
SEED_BITS = 53  # as many as a JSON number holds exactly, so that a reported seed can be sent back


def _never() -> bool:
    return False


def _ignore(done_tokens: int, total_tokens: int) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """What to generate from. `seed` is always set; `choice` numbers several answers to one prompt.

    `strip_leading_space` drops the space that some vocabularies put before an answer's first word. `is_cancelled` is called
    between chunks and steps. `on_progress` is called with the number of prompt tokens that are done. `scores_prompt` asks
    for the log-probabilities of the prompt's tokens, too, with as many alternatives as `params.logprobs` says; then nothing
    is reused, though what is computed is kept. `wants_state` asks for the last hidden state after the prompt; then nothing
    is generated. `end_ids` end this answer besides the model's own.

    `resumed_ids` are tokens of the answer that were generated before, perhaps on another machine. They count as generated:
    the answer goes on after them with the tokens, and the text, that it would have had without a break.
    """

    ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    boundaries: Sequence[Boundary] = ()
    salt: str = ""
    seed: int = 0
    choice: int = 0
    store: bool = True
    keep: bool = False
    strip_leading_space: bool = False
    scores_prompt: bool = False
    wants_state: bool = False
    end_ids: frozenset[int] = frozenset()
    resumed_ids: Sequence[int] = ()
    is_cancelled: Callable[[], bool] = _never
    on_progress: Callable[[int, int], None] = _ignore

    @property
    def known_ids(self) -> Sequence[int]:
        """What a lane must hold before the next token can be chosen: the prompt, and what was generated before."""
        return [*self.ids, *self.resumed_ids] if self.resumed_ids else self.ids


def default_max_tokens(context_tokens: int) -> int:
    """How many tokens an answer may have if neither the request nor a setting says it: a quarter of the context.

    It is at most 8,192, and at least 256 if the context has room for them behind the prompt.
    """
    return max(_LEAST_TOKENS, min(_MOST_TOKENS, context_tokens // 4))


class Uniforms:
    """The numbers in [0, 1) that draw the tokens of the `choice`-th answer to a request with this seed."""

    def __init__(self, seed: int, choice: int) -> None:
        self._start = blake2b(f"{seed},{choice},".encode(), digest_size=8, person=b"bough uniform")

    def at(self, index: int) -> float:
        """The number for the token at `index`: a hash of "seed,choice,index", whose start is hashed only once."""
        hashed = self._start.copy()
        hashed.update(b"%d" % index)
        return (int.from_bytes(hashed.digest(), "big") >> (64 - _BITS)) / (1 << _BITS)


def choose_seed(seed: int | None, random_bits: Callable[[int], int]) -> int:
    """The seed that was asked for, or a fresh one from `random_bits` (such as `secrets.randbits`)."""
    return random_bits(SEED_BITS) if seed is None else seed
