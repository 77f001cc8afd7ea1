"""What is to be computed for one request, as one frozen value in tokens, and its randomness.

The server and the library make the same request, and it can be pickled for another machine. Randomness goes by position:
the same (seed, choice, index) always gives the same number. So the result does not depend on other requests, their order,
or the machine.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from bough.models.prompts import EncodedPrompt
from bough.tokens import Tokens
from bough.types import Boundary, SamplingParams

_MOST_TOKENS, _LEAST_TOKENS = 8_192, 256  # of an answer without a limit
_BITS = 53  # as many as a float holds exactly
SEED_BITS = 53  # as many as a JSON number holds exactly, so that a reported seed can be sent back


@dataclass(frozen=True)
class Request:
    """What to generate from. `choice` numbers several answers to one prompt; `end_ids` end the answer like the model's own.

    `seed` is the one that is used, whether `params` has one or not. `deadline_s` is a time of this process's monotonic
    clock. `tenant` names the client, where its identity is proved. `scores_prompt` asks for the log-probabilities of the
    prompt's tokens, with as many alternatives as `params.logprobs` says: nothing is reused then, but what is computed is
    kept. `wants_state` asks for the last hidden state after the prompt: nothing is generated then.

    `resumed_ids` are tokens of the answer that were generated before, perhaps on another machine. They count as generated:
    the answer goes on after them with the tokens, and the text, that it would have had without a break.
    """

    tokens: Tokens
    params: SamplingParams = field(default_factory=SamplingParams)
    boundaries: Sequence[Boundary] = ()
    is_chat: bool = False
    end_ids: frozenset[int] = frozenset()
    salt: str = ""
    tenant: str = ""
    deadline_s: float = math.inf
    seed: int = 0
    choice: int = 0
    keep_state: bool = True
    keep: bool = False
    scores_prompt: bool = False
    wants_state: bool = False
    resumed_ids: Sequence[int] = ()

    @classmethod
    def of(cls, prompt: EncodedPrompt, params: SamplingParams, **options: Any) -> Request:
        """A request for an encoded prompt, with the seed of its parameters or a random one; options are other fields."""
        seed = choose_seed(params.seed, secrets.randbits)
        return cls(prompt.tokens, params, prompt.boundaries, prompt.is_chat, prompt.end_ids, seed=seed, **options)

    @property
    def known(self) -> Tokens:
        """What a lane must hold before the next token can be chosen: the prompt, and what was generated before."""
        return self.tokens + Tokens.of(self.resumed_ids) if self.resumed_ids else self.tokens


def default_max_tokens(context_tokens: int) -> int:
    """The most tokens of an answer without a limit: a quarter of the context, but at least 256 and at most 8,192."""
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
