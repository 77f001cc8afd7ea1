"""`bough bench prefill`: the time of a run of tokens on one lane, on the engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from bough.bench.speed.figures import Figure, collect
from bough.bench.speed.variants import PreparedLane, Variant, evaluate_in_runs
from bough.bench.workload import random_prompts
from bough.errors import RequestError


@dataclass(frozen=True)
class PrefillSetup:
    """The sizes to measure: runs of so many tokens on lanes with so many rows, in so many rounds."""

    tokens: Sequence[int] = (1, 16, 64, 512, 2048)
    rows: Sequence[int] = (0,)
    rounds: int = 3

    @property
    def num_cases(self) -> int:
        return len(self.tokens) * len(self.rows)


def measure_prefill(variants: Sequence[Variant], setup: PrefillSetup) -> Iterator[list[Figure]]:
    """For each size the figures of all variants, which take turns round by round."""
    for rows in setup.rows:
        with ExitStack() as stack:
            prepared = {
                variant.weights: stack.enter_context(closing(_prepare(variant, rows, setup))) for variant in variants
            }
            for count in setup.tokens:
                yield _measure_case(variants, prepared, rows, count, setup.rounds)


def _prepare(variant: Variant, rows: int, setup: PrefillSetup) -> PreparedLane:
    engine, longest = variant.engine, max(setup.tokens)
    if rows + longest > engine.context_tokens:
        raise RequestError(
            f"{rows:,} rows and {longest:,} tokens do not fit into the context of {engine.context_tokens:,} tokens"
        )
    return PreparedLane(engine, random_prompts(range(engine.vocab_size), rows, 1)[0], longest)


def _measure_case(
    variants: Sequence[Variant], prepared: dict[str, PreparedLane], rows: int, count: int, rounds: int
) -> list[Figure]:
    times: dict[str, list[float]] = {variant.weights: [] for variant in variants}
    for number in range(-1, rounds):
        for variant in variants:
            seconds = _time_run(variant, prepared[variant.weights], count)
            if number >= 0:  # the round before the first warms up
                times[variant.weights].append(seconds)
    return collect(rows, count, count, times)


def _time_run(variant: Variant, prepared: PreparedLane, count: int) -> float:
    ids = random_prompts(range(variant.engine.vocab_size), count, 1, seed=2)[0]
    prepared.put_back()
    variant.engine.synchronize()
    started_s = time.perf_counter()
    evaluate_in_runs(variant.engine, prepared.lane, ids)
    variant.engine.synchronize()
    return time.perf_counter() - started_s
