"""The first token: of a prompt that is not known, of one that is known as a whole, and of a few new tokens on a known one.

The time runs from submitting a request to the delivery of its first token. Lanes are empty at the start, so that a known
prompt is adopted from the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.gpu.driver import ANSWER_TOKENS, Delivery, Driver
from benchmarks.gpu.setup import GpuFigure, GpuSetup
from benchmarks.timing import clear_lanes, median_ms
from bough.bench.workload import random_prompts

WARM_ROUNDS = 2


def measure_first(driver: Driver, setup: GpuSetup) -> Iterator[GpuFigure]:
    """Cold, rested and back to back; then cached, with nothing new and with some new tokens."""
    vocab = range(driver.runtime.engine.vocab_size)
    fresh = iter(random_prompts(vocab, setup.tokens, 2 * (WARM_ROUNDS + setup.rounds), seed=3))
    yield _measure(driver, setup, f"cold, {setup.tokens:,} tokens, rested", lambda: next(fresh), rest_s=setup.rest_s)
    yield _measure(driver, setup, f"cold, {setup.tokens:,} tokens, back to back", lambda: next(fresh))
    driver.runtime.prefix_cache.upkeep.clear()
    (prefix,) = random_prompts(vocab, setup.tokens, 1)
    driver.answer(prefix)
    yield _measure(driver, setup, "fully cached", lambda: prefix, is_known=True)
    for count in setup.new_tokens:
        tails = iter(random_prompts(vocab, count, WARM_ROUNDS + setup.rounds, seed=4 + count))
        name = f"{count:,} new on {setup.tokens:,} cached"
        yield _measure(driver, setup, name, lambda tails=tails: [*prefix, *next(tails)], is_known=True)  # type: ignore[misc]


def _measure(
    driver: Driver,
    setup: GpuSetup,
    name: str,
    next_prompt: Callable[[], list[int]],
    *,
    rest_s: float = 0.0,
    is_known: bool = False,
) -> GpuFigure:
    """The median of the rounds, after some that warm up: the scheduler learns from them how long a chunk may be."""
    answers = [_ask(driver, next_prompt(), rest_s, is_known) for _ in range(WARM_ROUNDS + setup.rounds)][WARM_ROUNDS:]
    times = [each.first_token_s for each in answers]
    usages = [each.completion.usage for each in answers if each.completion is not None]
    detail = {
        "round_ms": [round(1000 * each, 3) for each in times],
        "cached_tokens": [usage.cached_tokens for usage in usages],
        "computed_tokens": [usage.computed_tokens for usage in usages],
    }
    return GpuFigure(name, median_ms(times), "ms", detail)


def _ask(driver: Driver, prompt: list[int], rest_s: float, is_known: bool) -> Delivery:
    if is_known:
        clear_lanes(driver.runtime)
    else:
        driver.runtime.prefix_cache.upkeep.clear()
    driver.runtime.engine.synchronize()
    time.sleep(rest_s)
    return driver.answer(prompt, ANSWER_TOKENS)
