"""How far other weights move the model's answers from those of float32.

float32 continues each prompt greedily. The other variant is given the same tokens, and its logits are compared at every
position. Up to the first position where its best token differs it gets what it would have written itself: so the number
of positions before that one is also the number of greedy tokens that are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.prompts import QualityPrompt
from bough.bench.variants import Variant, evaluate_in_runs
from bough.engines.contract import Engine, Logits
from bough.errors import RequestError
from bough.prompting.prompt import encode_ask
from bough.prompting.user_prompt import read_prompt
from bough.runtime import Runtime

REFERENCE = "float32"

Row = NDArray[np.float64]
"""The logits of one position."""


@dataclass(frozen=True)
class Quality:
    """One variant against float32, over the positions of one prompt or of several.

    `equal_tokens`: greedy tokens before the first difference, added up over the prompts. `same_best`: positions with the
    same best token. `largest_gap` is, of the positions where they differ, the largest lead that float32's best token has
    over the one that the other variant prefers; a lead near 0 is a tie that rounding decides.
    """

    weights: str
    prompt: str
    positions: int
    equal_tokens: int
    same_best: int
    kl_mean: float
    kl_max: float
    largest_difference: float
    largest_gap: float

    @property
    def is_all_equal(self) -> bool:
        return self.equal_tokens == self.positions

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Continuation:
    """What float32 wrote after a prompt, and its logits before each of these tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: list[NDArray[np.float32]]


def measure_quality(
    variants: Sequence[Variant], prompts: Sequence[QualityPrompt], num_tokens: int
) -> Iterator[list[Quality]]:
    """For each prompt, every variant but the first against the first, which is float32; `num_tokens` positions each."""
    reference, *others = variants
    for prompt in prompts:
        ids = encode(reference.runtime, prompt)
        if len(ids) + num_tokens > reference.engine.context_tokens:
            context = reference.engine.context_tokens
            raise RequestError(
                f"{num_tokens:,} tokens after {prompt.name} do not fit into the context of {context:,} tokens"
            )
        written = continue_greedily(reference.engine, ids, num_tokens)
        yield [compare(variant, prompt.name, written) for variant in others]


def encode(runtime: Runtime, prompt: QualityPrompt) -> list[int]:
    """The ids of a prompt; a chat goes through the model's template."""
    return encode_ask(read_prompt(prompt.text, raw=not prompt.is_chat), runtime.facts).tokens.ids


def continue_greedily(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Continuation:
    """Write so many tokens, whether or not the model ends its answer."""
    rows: list[NDArray[np.float32]] = []
    tokens: list[int] = []
    for row in _run(engine, prompt, tokens, num_tokens):
        rows.append(row.astype(np.float32))
        tokens.append(int(row.argmax()))
    return Continuation(tuple(prompt), tuple(tokens), rows)


def compare(variant: Variant, prompt: str, written: Continuation) -> Quality:
    """The logits of a variant that is given the same tokens."""
    rows = zip(written.rows, _run(variant.engine, written.prompt, written.tokens, len(written.tokens)), strict=True)
    found = [_compare_rows(expected.astype(np.float64), row) for expected, row in rows]
    wrong = [number for number, each in enumerate(found) if each.gap is not None]
    return Quality(
        weights=variant.weights,
        prompt=prompt,
        positions=len(found),
        equal_tokens=wrong[0] if wrong else len(found),
        same_best=len(found) - len(wrong),
        kl_mean=sum(each.kl for each in found) / len(found),
        kl_max=max(each.kl for each in found),
        largest_difference=max(each.difference for each in found),
        largest_gap=max((each.gap for each in found if each.gap is not None), default=0.0),
    )


def add_up(parts: Sequence[Quality]) -> Quality:
    """The figures of one variant over all prompts."""
    positions = sum(each.positions for each in parts)
    return Quality(
        weights=parts[0].weights,
        prompt="all",
        positions=positions,
        equal_tokens=sum(each.equal_tokens for each in parts),
        same_best=sum(each.same_best for each in parts),
        kl_mean=sum(each.kl_mean * each.positions for each in parts) / positions,
        kl_max=max(each.kl_max for each in parts),
        largest_difference=max(each.largest_difference for each in parts),
        largest_gap=max(each.largest_gap for each in parts),
    )


@dataclass(frozen=True)
class _Difference:
    kl: float
    difference: float
    gap: float | None  # None: the best token is the same


def _compare_rows(expected: Row, row: Row) -> _Difference:
    best, preferred = int(expected.argmax()), int(row.argmax())
    gap = None if best == preferred else float(expected[best] - expected[preferred])
    known = np.isfinite(expected)  # some models never give certain tokens: their logits are -inf
    expected, row = expected[known], row[known]
    return _Difference(kl_divergence(expected, row), float(np.abs(expected - row).max()), gap)


def kl_divergence(expected: Row, row: Row) -> float:
    """KL(expected ‖ row) of two distributions given as logits, in nats. At least 0: rounding can make it slightly less."""
    log_expected, log_row = _log_softmax(expected), _log_softmax(row)
    return max(0.0, float(np.sum(np.exp(log_expected) * (log_expected - log_row))))


def _log_softmax(row: Row) -> Row:
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _run(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], num_tokens: int) -> Iterator[Row]:
    """The logits before each of `num_tokens` tokens. The caller may append a token to `tokens` after each."""
    lane = engine.make_lane()
    lane.reserve(len(prompt) + num_tokens)
    logits = evaluate_in_runs(engine, lane, prompt)
    for number in range(num_tokens):
        if number > 0:
            (logits,) = engine.step([lane], [tokens[number - 1]])
        yield _to_row(logits)
    lane.clear()


def _to_row(logits: Logits) -> Row:
    """Logits of any engine in double precision, on the host."""
    return np.asarray(logits.tolist() if hasattr(logits, "tolist") else logits, dtype=np.float64)
