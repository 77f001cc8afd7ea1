"""Host cost of a chunk: the Python time of `Session.publish` after a prefill chunk, at different depths of a conversation.

There is no engine: a lane has an offset, and a page a size. The disk is a real one in a temporary folder; its writer is
idle while a chunk is timed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.null_engine import NullEngine
from bough.cache.disk import Disk
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import Tiers
from bough.cache.session import Session
from bough.cache.tree.state import PAGE_TOKENS
from bough.replay.engine import CountingLane

CHUNK_TOKENS = 256
NUM_CHUNKS = 20
DEPTHS = (1000, 100_000)


@dataclass(frozen=True)
class ChunkVariant:
    """What the chunk is published to: a disk below the device or none, and room on the device or none."""

    has_disk: bool = False
    is_full: bool = False


VARIANTS = {
    "memory": ChunkVariant(),
    "memory, full": ChunkVariant(is_full=True),
    "disk": ChunkVariant(has_disk=True),
}


def measure_chunk_us(depths: Sequence[int]) -> dict[str, dict[int, float]]:
    """The median of publishing one chunk in µs: for each variant, at each depth."""
    return {
        name: {depth: round(1e6 * measure_chunk_s(variant, depth), 1) for depth in depths}
        for name, variant in VARIANTS.items()
    }


def measure_chunk_s(variant: ChunkVariant, depth: int, num_chunks: int = NUM_CHUNKS) -> float:
    """Seconds to publish one chunk that begins at the first page border from `depth` on, or a few chunks later."""
    start = -(-depth // PAGE_TOKENS) * PAGE_TOKENS
    total = start + num_chunks * CHUNK_TOKENS
    with _open_cache(variant, total) as cache:
        prompt = _random_tokens(total, seed=1)
        with cache.begin(prompt) as session:
            _feed(session, prompt[:start])
            session.publish()
            return statistics.median(_publish_s(cache, session, prompt, at) for at in range(start, total, CHUNK_TOKENS))


def _publish_s(cache: PrefixCache, session: Session, prompt: list[int], start: int) -> float:
    if cache.memory.disk is not None:
        cache.memory.disk.flush()
    _feed(session, prompt[start : start + CHUNK_TOKENS])
    started = time.perf_counter()
    session.publish()
    return time.perf_counter() - started


def _feed(session: Session, ids: list[int]) -> None:
    with session.feeding(ids):
        lane = session.lane
        assert isinstance(lane, CountingLane)
        lane.offset += len(ids)


def _random_tokens(number: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(number)]


@contextmanager
def _open_cache(variant: ChunkVariant, total: int) -> Iterator[PrefixCache]:
    """A cache for a conversation of `total` tokens; a full one holds others, which have to make room for it."""
    budget_bytes = total + total // 4
    with TemporaryDirectory(prefix="bough-chunk-") as folder:
        store, disk = NullEngine(), _open_disk(Path(folder) / "tree") if variant.has_disk else None
        tiers = Tiers(store, disk=disk) if disk is not None else None
        cache = PrefixCache(store, [store.make_lane(), store.make_lane()], budget_bytes=budget_bytes, tiers=tiers)
        try:
            if variant.is_full:
                _fill(cache, budget_bytes, total // 16)
            yield cache
        finally:
            cache.upkeep.close()


def _fill(cache: PrefixCache, budget_bytes: int, step: int) -> None:
    """Run conversations of `step` tokens until the budget is used up."""
    for number in range(budget_bytes // step + 1):
        prompt = _random_tokens(step, seed=100 + number)
        with cache.begin(prompt) as session:
            _feed(session, prompt)


def _open_disk(folder: Path) -> Disk:
    return Disk(folder, fingerprint="chunk", page_tokens=PAGE_TOKENS, budget_bytes=1 << 40, floor_bytes=0)
