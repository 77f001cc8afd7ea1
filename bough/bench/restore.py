"""`bough bench restore`: return to a long conversation by restoring it from the tree, against computing it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from bough.bench.timing import answer, clear_lanes, first_token_ms, median_ms, timed_begin
from bough.bench.workload import random_prompts
from bough.runtime import Runtime

ANSWER_TOKENS = 9


@dataclass(frozen=True)
class RestoreFigures:
    """Medians in milliseconds. The tree's pages are on the device; the lane is cleared before it adopts them."""

    tokens: int
    cold_first_token_ms: float
    restore_ms: float
    restored_first_token_ms: float
    live_first_token_ms: float
    decode_ms: float
    snapshot_bytes: int
    answers_equal: bool
    setup: dict[str, str] = field(default_factory=dict)


def measure_restore(runtime: Runtime, num_tokens: int, rounds: int = 5) -> RestoreFigures:
    """Measure the first token of a prompt: computed, restored from the tree, and with an idle lane that still holds it."""
    (prompt,) = random_prompts(range(runtime.engine.vocab_size), num_tokens, 1)
    answer(runtime, prompt[: num_tokens // 2], ANSWER_TOKENS)  # the first run chooses kernels and allocates memory
    cold = []
    for _ in range(rounds):
        runtime.prefix_cache.clear()
        cold.append(answer(runtime, prompt, ANSWER_TOKENS))
    snapshot_bytes = runtime.prefix_cache.memory.tree_bytes
    restored = []
    for _ in range(rounds):
        clear_lanes(runtime)
        restored.append(answer(runtime, prompt, ANSWER_TOKENS))
    live = [answer(runtime, prompt, ANSWER_TOKENS) for _ in range(rounds)]
    assert all(each.usage.cached_tokens == num_tokens - 1 for each in [*restored, *live])
    everything = [*cold, *restored, *live]
    return RestoreFigures(
        tokens=num_tokens,
        cold_first_token_ms=first_token_ms(cold),
        restore_ms=median_ms([_time_restore(runtime, prompt) for _ in range(rounds)]),
        restored_first_token_ms=first_token_ms(restored),
        live_first_token_ms=first_token_ms(live),
        decode_ms=median_ms([each.timings.decode_s / (len(each.token_ids) - 1) for each in everything]),
        snapshot_bytes=snapshot_bytes,
        answers_equal=len({each.token_ids for each in everything}) == 1,
        setup=runtime.engine.describe(),
    )


def _time_restore(runtime: Runtime, prompt: list[int]) -> float:
    with timed_begin(runtime, prompt, ANSWER_TOKENS) as begun:
        return begun.seconds
