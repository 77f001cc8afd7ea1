"""Coming back to a long conversation: from the tree, against computing it again."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from bough.runner import Runner
from bough.types import Completion

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16_384,
    },
}


@dataclass(frozen=True)
class RestoreFigures:
    """Medians in milliseconds. The snapshot lies on the device; the lane that adopts it was cleared before."""

    tokens: int
    cold_first_token_ms: float
    restore_ms: float
    restored_first_token_ms: float
    live_first_token_ms: float
    decode_ms: float
    snapshot_bytes: int
    answers_equal: bool
    setup: dict[str, str] = field(default_factory=dict)


def measure_restore(runner: Runner, num_tokens: int, rounds: int = 5) -> RestoreFigures:
    """The first token of a prompt: cold, from the tree's snapshot, and with a lane that still rests on it."""
    chance = random.Random(0)
    prompt = [chance.randrange(runner.engine.vocab_size) for _ in range(num_tokens)]
    _answer(runner, prompt[: num_tokens // 2])  # kernels are chosen and memory is taken on first use
    cold, answers = [], []
    for _ in range(rounds):
        runner.cache.clear()
        answers.append(_answer(runner, prompt))
        cold.append(answers[-1].timings.first_token_s)
    snapshot_bytes = runner.prefix_cache.memory.tree_bytes
    restored = []
    for _ in range(rounds):
        for slot in runner.prefix_cache.lanes.slots:
            slot.clear()
        restored.append(_answer(runner, prompt))
    live = [_answer(runner, prompt) for _ in range(rounds)]
    assert all(answer.usage.cached_tokens == num_tokens - 1 for answer in [*restored, *live])
    everything = [*answers, *restored, *live]
    return RestoreFigures(
        tokens=num_tokens,
        cold_first_token_ms=_median_ms(cold),
        restore_ms=_median_ms([_time_begin(runner, prompt) for _ in range(rounds)]),
        restored_first_token_ms=_median_ms([answer.timings.first_token_s for answer in restored]),
        live_first_token_ms=_median_ms([answer.timings.first_token_s for answer in live]),
        decode_ms=_median_ms([answer.timings.decode_s / (len(answer.token_ids) - 1) for answer in everything]),
        snapshot_bytes=snapshot_bytes,
        answers_equal=len({answer.token_ids for answer in everything}) == 1,
        setup=runner.engine.describe(),
    )


def _answer(runner: Runner, prompt: list[int]) -> Completion:
    return runner.generate(prompt, max_tokens=9, ignore_eos=True)


def _time_begin(runner: Runner, prompt: list[int]) -> float:
    """Only the restoring, by itself: match, plan, and the copy into a cleared lane, until it is done on the device."""
    cache = runner.prefix_cache
    for slot in cache.lanes.slots:
        slot.clear()
    runner.engine.synchronize()
    started = time.perf_counter()
    session = cache.begin(prompt, max_new_tokens=9)
    runner.engine.synchronize()
    seconds = time.perf_counter() - started
    session.close()
    return seconds


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)
