"""Coming back from held host memory: the cache demotes a whole prompt, and the next request brings it back."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.driver import ANSWER_TOKENS, Delivery, Driver
from benchmarks.gpu.setup import GpuFigure, GpuSetup
from benchmarks.timing import clear_lanes, median_ms, timed_begin
from bough.bench.workload import random_prompts
from bough.cache.tree.state import Tier
from bough.errors import RequestError
from bough.runtime import Runtime


def measure_page_in(driver: Driver, setup: GpuSetup) -> Iterator[GpuFigure]:
    """The first token of a prompt that lies on the host, and the page-in by itself with its rate."""
    runtime = driver.runtime
    if not runtime.prefix_cache.memory.host_budget_bytes:
        device = runtime.engine.info.device
        raise RequestError(f"there is no host tier on {device}: nothing can be brought back from host memory")
    runtime.prefix_cache.upkeep.clear()
    (prompt,) = random_prompts(range(runtime.engine.vocab_size), setup.tokens, 1)
    driver.answer(prompt)
    answers = [_come_back(driver, prompt) for _ in range(setup.rounds + 1)][1:]
    times = [each.first_token_s for each in answers]
    loaded = [each.completion.timings.loading.host_bytes for each in answers if each.completion is not None]
    detail = {"round_ms": [round(1000 * each, 3) for each in times], "host_bytes": loaded}
    yield GpuFigure("first token, from the host", median_ms(times), "ms", detail)
    page_ins = [_time_page_in(runtime, prompt) for _ in range(setup.rounds)]
    seconds = sorted(page_ins)[len(page_ins) // 2]
    yield GpuFigure("page-in alone", median_ms(page_ins), "ms", {"round_ms": [round(1000 * each, 3) for each in page_ins]})
    yield GpuFigure("page-in, rate", round(loaded[0] / seconds / 1e9, 2), "GB/s", {"host_bytes": loaded[0]})


def demote_all(runtime: Runtime) -> int:
    """Empty the lanes and let the cache move everything on the device to the host; returns the bytes that are there."""
    clear_lanes(runtime)
    cache = runtime.prefix_cache
    while cache.residency.evictor.demote_one():
        pass
    left_bytes = cache.memory.num_bytes[Tier.DEVICE]
    if left_bytes:
        raise RequestError(f"{left_bytes:,} bytes stay on the device: the host tier has no room for them")
    runtime.engine.synchronize()
    return cache.memory.num_bytes[Tier.HOST]


def _come_back(driver: Driver, prompt: list[int]) -> Delivery:
    demote_all(driver.runtime)
    return driver.answer(prompt, ANSWER_TOKENS)


def _time_page_in(runtime: Runtime, prompt: list[int]) -> float:
    demote_all(runtime)
    with timed_begin(runtime, prompt, ANSWER_TOKENS) as begun:
        return begun.seconds
