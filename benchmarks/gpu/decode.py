"""Decode: milliseconds a token and tokens a second as listeners get them, greedy and with sampling, in windows.

Requests share one prefix, or have a prompt each. A window begins when every request decodes and has had some tokens. It
ends when each has had as many more as the setup says, and is timed from the last token before it to its own last one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.driver import Delivery, Driver, require_running
from benchmarks.gpu.kernels import count_kernels
from benchmarks.gpu.setup import GpuFigure, GpuSetup
from bough.bench.workload import random_prompts
from bough.types import SamplingParams

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
PROFILED_STEPS = 8


@dataclass(frozen=True)
class GpuDecodeCase:
    """Prompts to decode together, and what is computed and kept before they come."""

    name: str
    prompts: list[list[int]]
    known: list[list[int]]

    @property
    def num_lanes(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class DecodeWindow:
    """One window: milliseconds of a token, and of its turns the host's own time, the engine's calls and the slowest."""

    token_ms: float
    host_ms: float
    engine_ms: dict[str, float]
    slowest_turn_ms: float


def make_cases(setup: GpuSetup, vocab_size: int) -> Iterator[GpuDecodeCase]:
    """Each number of lanes on one prefix, then the lanes that share nothing."""
    for count in setup.lanes:
        yield shared_case(setup, vocab_size, count)
    if setup.distinct:
        prompts = random_prompts(range(vocab_size), setup.tokens, setup.distinct, seed=2)
        yield GpuDecodeCase(f"{setup.distinct} distinct", prompts, known=prompts)


def shared_case(setup: GpuSetup, vocab_size: int, count: int) -> GpuDecodeCase:
    """So many requests on one prefix, each with a few tokens of its own after it."""
    (prefix,) = random_prompts(range(vocab_size), setup.tokens, 1)
    tails = random_prompts(range(vocab_size), setup.tail_tokens, count, seed=1)
    return GpuDecodeCase(f"{count} on one prefix", [[*prefix, *tail] for tail in tails], known=[prefix])


def measure_decode(driver: Driver, setup: GpuSetup) -> Iterator[GpuFigure]:
    """For each case: greedy, then sampled, then the ratio of the two; with a profile, the kernels of a step."""
    for case in make_cases(setup, driver.runtime.engine.vocab_size):
        greedy = measure_case(driver, setup, case, GREEDY)
        sampled = measure_case(driver, setup, case, SAMPLED)
        yield from (greedy, sampled)
        ratio = sampled.detail["tokens_per_s"] / greedy.detail["tokens_per_s"]
        yield GpuFigure(f"{case.name}: sampled against greedy", round(ratio, 4), "×")
        if setup.is_profiled:
            yield _profile(driver, setup, case)


def measure_case(driver: Driver, setup: GpuSetup, case: GpuDecodeCase, sampling: dict[str, Any]) -> GpuFigure:
    """Milliseconds a token: the median of the windows."""
    with decoding(driver, setup, case, sampling) as deliveries:
        windows = [_time_window(driver, deliveries, setup.steps) for _ in range(setup.windows)]
    token_ms = statistics.median(each.token_ms for each in windows)
    best = min(windows, key=lambda each: each.token_ms)
    detail = {
        "lanes": case.num_lanes,
        "tokens_per_s": round(1000 * case.num_lanes / token_ms, 1),
        "best_tokens_per_s": round(1000 * case.num_lanes / best.token_ms, 1),
        "window_ms": [round(each.token_ms, 3) for each in windows],
        "host_ms": round(statistics.median(each.host_ms for each in windows), 3),
        "engine_ms": best.engine_ms,
        "slowest_turn_ms": round(max(each.slowest_turn_ms for each in windows), 3),
    }
    return GpuFigure(f"{case.name}, {'sampled' if sampling else 'greedy'}", round(token_ms, 3), "ms a token", detail)


@contextmanager
def decoding(driver: Driver, setup: GpuSetup, case: GpuDecodeCase, sampling: dict[str, Any]) -> Iterator[list[Delivery]]:
    """All requests of a case, decoding and warmed up, on what the case says is known. They are cancelled at the end."""
    driver.runtime.prefix_cache.upkeep.clear()
    for ids in case.known:
        driver.answer(ids, max_tokens=0)
    spare = 2 * case.num_lanes  # the first decode while the last are still being read
    most = spare + setup.warm_tokens + setup.windows * setup.steps + 2 * PROFILED_STEPS
    params = SamplingParams(max_tokens=most, ignore_eos=True, **sampling)
    deliveries = [driver.submit(ids, params) for ids in case.prompts]
    try:
        driver.turn_until(lambda: driver.is_decoding(case.num_lanes), deliveries)
        _deliver(driver, deliveries, setup.warm_tokens)
        yield deliveries
    finally:
        for each in deliveries:
            each.is_cancelled = True
        driver.finish()


def _deliver(driver: Driver, deliveries: Sequence[Delivery], steps: int) -> None:
    """Run turns until every request has had so many tokens more."""
    goals = [len(each.token_s) + steps for each in deliveries]
    driver.turn_until(
        lambda: all(len(each.token_s) >= goal for each, goal in zip(deliveries, goals, strict=True)), deliveries
    )


def _time_window(driver: Driver, deliveries: Sequence[Delivery], steps: int) -> DecodeWindow:
    """Time turns until the first request has had so many tokens; all requests get one in every step."""
    before = [len(each.token_s) for each in deliveries]
    started_s = max(each.token_s[-1] for each in deliveries)
    driver.engine.seconds.clear()
    first, hosts, turns = deliveries[0], [], []
    while len(first.token_s) < before[0] + steps and not first.is_over:
        turn_s, engine_s = time.perf_counter(), driver.engine.total_s
        driver.turn()
        turns.append(time.perf_counter() - turn_s)
        hosts.append(turns[-1] - (driver.engine.total_s - engine_s))
    require_running(deliveries)
    ended_s = max(each.token_s[-1] for each in deliveries)
    tokens = sum(len(each.token_s) - count for each, count in zip(deliveries, before, strict=True))
    calls = {name: round(1000 * seconds / len(turns), 3) for name, seconds in driver.engine.seconds.items()}
    return DecodeWindow(
        token_ms=1000 * (ended_s - started_s) * len(deliveries) / tokens,
        host_ms=1000 * statistics.median(hosts),
        engine_ms=calls,
        slowest_turn_ms=1000 * max(turns),
    )


def _profile(driver: Driver, setup: GpuSetup, case: GpuDecodeCase) -> GpuFigure:
    """The microseconds of a step by the sum over its kernels, and the kernels."""
    with decoding(driver, setup, case, GREEDY) as deliveries:
        kernels = count_kernels(lambda: _deliver(driver, deliveries, PROFILED_STEPS), PROFILED_STEPS)
    total_us = sum(each.microseconds for each in kernels)
    rows = [each.as_dict() for each in kernels]
    return GpuFigure(f"{case.name}: kernels of a step", round(total_us, 1), "µs", {"kernels": rows})
