"""`bough bench decode`: the time of one step of one or several lanes, on the engine alone.

Sampling is not part of a step. Every lane has a prompt of its own, and every variant gets the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from bough.bench.speed.figures import Figure, collect
from bough.bench.speed.variants import PreparedLane, Variant
from bough.bench.workload import random_prompts
from bough.engines.contract import Engine
from bough.errors import RequestError

_UNTIMED_STEPS = 1  # after another variant has run, the first step is slower


@dataclass(frozen=True)
class DecodeSetup:
    """The sizes to measure: numbers of lanes at numbers of rows, so many steps in so many rounds."""

    lanes: Sequence[int] = (1, 2, 4, 8)
    depths: Sequence[int] = (0, 500)
    steps: int = 32
    rounds: int = 5

    @property
    def num_cases(self) -> int:
        return len(self.lanes) * len(self.depths)


def measure_decode(variants: Sequence[Variant], setup: DecodeSetup) -> Iterator[list[Figure]]:
    """For each size the figures of all variants, which take turns round by round."""
    for depth in setup.depths:
        with ExitStack() as stack:
            prepared = {
                variant.weights: stack.enter_context(_prepare(variant.engine, depth, setup)) for variant in variants
            }
            for count in setup.lanes:
                yield _measure_case(variants, prepared, depth, count, setup)


def _measure_case(
    variants: Sequence[Variant], prepared: dict[str, list[PreparedLane]], depth: int, count: int, setup: DecodeSetup
) -> list[Figure]:
    times: dict[str, list[float]] = {variant.weights: [] for variant in variants}
    for number in range(-1, setup.rounds):
        for variant in variants:
            seconds = _time_steps(variant.engine, prepared[variant.weights][:count], setup.steps)
            if number >= 0:  # the round before the first warms up
                times[variant.weights].append(seconds)
    return collect(depth, count, count, times)


@contextmanager
def _prepare(engine: Engine, depth: int, setup: DecodeSetup) -> Iterator[list[PreparedLane]]:
    """Lanes with `depth` rows each, and room for the steps."""
    room = setup.steps + _UNTIMED_STEPS
    if depth + room > engine.context_tokens:
        raise RequestError(
            f"{depth:,} rows and {room:,} steps do not fit into the context of {engine.context_tokens:,} tokens"
        )
    prompts = random_prompts(range(engine.vocab_size), depth, max(setup.lanes))
    with ExitStack() as stack:
        yield [stack.enter_context(closing(PreparedLane(engine, prompt, room))) for prompt in prompts]


def _time_steps(engine: Engine, prepared: Sequence[PreparedLane], steps: int) -> float:
    """The mean seconds of a step."""
    for each in prepared:
        each.put_back()
    lanes = [each.lane for each in prepared]
    tokens = random_prompts(range(engine.vocab_size), len(lanes), steps + _UNTIMED_STEPS, seed=1)
    for ids in tokens[:_UNTIMED_STEPS]:
        engine.step(lanes, ids)
    engine.synchronize()
    started_s = time.perf_counter()
    for ids in tokens[_UNTIMED_STEPS:]:
        engine.step(lanes, ids)
        engine.synchronize()
    return (time.perf_counter() - started_s) / steps
