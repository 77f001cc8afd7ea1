"""Memory: what the cache counts for many lanes on one prefix, and for conversations that rest in tree and idle lanes.

Each is compared with the bytes of the rows that have to be held, and with those of the whole pages that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.decode import GREEDY, decoding, shared_case
from benchmarks.gpu.driver import ANSWER_TOKENS, Driver
from benchmarks.gpu.setup import GpuFigure, GpuSetup
from bough.bench.workload import random_prompts
from bough.cache.admin.stats import stats
from bough.cache.tree.state import PAGE_TOKENS
from bough.runtime import Runtime


def measure_memory(driver: Driver, setup: GpuSetup) -> Iterator[GpuFigure]:
    """The bytes that lanes and tree take together, in units of what the rows themselves take."""
    yield _measure_lanes(driver, setup)
    yield _measure_conversations(driver, setup)


def _measure_lanes(driver: Driver, setup: GpuSetup) -> GpuFigure:
    """The largest number of lanes on one prefix, while they decode."""
    runtime, count = driver.runtime, max(setup.lanes)
    runtime.prefix_cache.upkeep.clear()
    allocated = allocated_bytes(runtime)
    with decoding(driver, setup, shared_case(setup, runtime.engine.vocab_size, count), GREEDY) as deliveries:
        tails = [setup.tail_tokens + len(each.token_ids) for each in deliveries]
        found = _count(runtime, [setup.tokens, *tails])
        found["allocated_before_bytes"], found["allocated_bytes"] = allocated, allocated_bytes(runtime)
    return GpuFigure(f"{count} lanes on one prefix: used against its rows", found["used_to_rows"], "×", found)


def _measure_conversations(driver: Driver, setup: GpuSetup) -> GpuFigure:
    """Conversations that share nothing and have ended: the tree holds them, and so do idle lanes."""
    runtime = driver.runtime
    runtime.prefix_cache.upkeep.clear()
    prompts = random_prompts(range(runtime.engine.vocab_size), setup.tokens, setup.conversations, seed=5)
    answers = [driver.answer(prompt) for prompt in prompts]
    found = _count(runtime, [setup.tokens + ANSWER_TOKENS - 1] * len(answers))
    found["idle_lanes_with_rows"] = sum(bool(slot.tokens) for slot in runtime.prefix_cache.lanes.slots)
    return GpuFigure(f"{len(prompts)} conversations at rest: used against their rows", found["used_to_rows"], "×", found)


def _count(runtime: Runtime, lengths: Sequence[int]) -> dict[str, Any]:
    """What the cache counts, and what runs of so many rows take by themselves and in whole pages."""
    cache = runtime.prefix_cache
    held = stats(cache.forest, cache.residency)
    row_bytes = sum(group.bytes_per_token for group in runtime.engine.groups)
    page_bytes = sum(-(-length // PAGE_TOKENS) for length in lengths) * PAGE_TOKENS * row_bytes
    rows_bytes = sum(lengths) * row_bytes
    used_bytes = cache.residency.room.used_bytes
    return {
        "tree_bytes": held["tree_bytes"],
        "lane_bytes": held["lane_bytes"],
        "used_bytes": used_bytes,
        "rows_bytes": rows_bytes,
        "page_bytes": page_bytes,
        "used_to_rows": round(used_bytes / max(rows_bytes, 1), 3),
        "used_to_pages": round(used_bytes / max(page_bytes, 1), 3),
    }


def allocated_bytes(runtime: Runtime) -> int | None:
    """Bytes that torch has allocated on the device, weights included; None where that is not counted."""
    if not runtime.engine.info.device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.memory_allocated()
