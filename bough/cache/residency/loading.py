"""Loading: how much of a planned prefix is brought up from the tiers below the device, and what all loads have in common.

A `DiskLoad` brings up what the tree knows and has on disk alone, a `Fetch` what other machines have sent to the shared
store; both are a `TierLoad`. Threads of the tier read; between two steps the engine's thread puts what has arrived into the
tree. The bytes that a request waits for are reserved. Content that cannot be read, or is not what it should be, is a miss:
the plan is made again with less. The same happens when loading turns out to be slower than computing, or when nothing
arrives at all.

Always true between calls (`check` asserts it): what is reserved in memory is what the loads under way have reserved, and
the disk reads nothing but what they want.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bough.cache.disk.reader import DiskReader, ReadProgress
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltTrie
from bough.cache.residency.rates import Clock, Rates
from bough.cache.residency.room import Room
from bough.cache.residency.saving import Saver
from bough.cache.tree.node import Node
from bough.cache.tree.plan import LiveRows, NeededItem, needed, plan
from bough.cache.tree.state import Group, Tier
from bough.types import Loading

Key = TypeVar("Key", bound=Hashable)
Content = TypeVar("Content", bound=Sized)

WASTE = 0.1
"""Reading that is given up may cost this share of computing everything."""

LEAST_WAIT_S = 0.05
"""Loads always wait this long: it is not noticed, and a thread may take as long to be woken."""

STALLED_S = 5.0
"""A tier that delivers no byte for this time is not waited for, even if it is not known what computing takes."""

UNKNOWN_S = 2.0
"""How long a tier is waited for that may not have the content, while it is not known what computing takes: it may hang."""

TAKE_S = 0.01
"""How long putting what has arrived into the tree may take at a time: other requests wait meanwhile."""


@dataclass(frozen=True)
class Depth:
    """How deep a lane should stand: as deep as content is loaded sooner than computed."""

    offset: int
    loading: Loading


@dataclass
class LoadCounts:
    """What could not be loaded: files that were not what they should be, loads without memory, and loads given up."""

    misses: int = 0
    failed_loads: int = 0
    slow_loads: int = 0


class Loader:
    """Decides what is worth loading, and has the parts that all loads use. `loads` are those under way."""

    def __init__(self, memory: Memory, evictor: Evictor, room: Room, saver: Saver, rates: Rates, use_clock: Clock) -> None:
        self.counts = LoadCounts()
        self.memory, self.evictor, self.room, self.saver = memory, evictor, room, saver
        self.rates = rates
        self.use_clock = use_clock
        self.clock: Callable[[], float] = time.perf_counter  # of how long loads take
        self.groups = memory.groups
        self.loads: set[TierLoad[Any, Any]] = set()
        self._measured = ReadProgress()

    def choose_depth(self, path: Sequence[Node], matched: int, live: LiveRows, offset: int, total: int) -> Depth:
        """The offset at or below `offset` from which the prompt's end is reached soonest, by the measured rates."""
        below = self._below_device(path, live, offset)
        if not below:
            return Depth(offset, Loading())
        all_s = self._load_s(below)
        if self.rates.prefill_s(0, total) is None:
            return Depth(offset, Loading(estimated_load_s=all_s))

        def seconds(at: int) -> float:
            return self._load_s(self._below_device(path, live, at)) + (self.rates.prefill_s(at, total) or 0.0)

        limits = {offset} | {each.start for each in _first_of_runs(below)}
        depths = {plan(self.groups, path, matched, live, limit) for limit in limits}
        best = min(depths, key=lambda at: (seconds(at), -at))
        without = self.rates.prefill_s(min(depths), offset) or 0.0
        return Depth(best, Loading(recomputed_tokens=offset - best, estimated_load_s=all_s, estimated_compute_s=without))

    def _below_device(self, path: Sequence[Node], live: LiveRows, offset: int) -> list[NeededItem]:
        return [each for each in needed(self.groups, path, live, offset) if each.item.tier is not Tier.DEVICE]

    def _load_s(self, items: Sequence[NeededItem]) -> float:
        return sum(each.item.content_bytes * self._byte_s(each.item.tier) for each in items)

    def _byte_s(self, tier: Tier) -> float:
        """Seconds for a byte from this tier to a lane; content on disk goes through the host."""
        measured = self.rates.byte_s(tier)
        if measured or tier is Tier.DISK or self.memory.tiers is None:
            return measured
        return self.memory.tiers.store.host_seconds_per_byte() or 0.0

    def on_disk(self, path: Sequence[Node], live: LiveRows, offset: int) -> list[NeededItem]:
        """The items to read before a lane can stand at `offset`, in the order in which they are wanted."""
        items = needed(self.groups, path, live, offset) if self.memory.disk is not None else ()
        return [each for each in items if each.item.tier is Tier.DISK]

    def loaded_bytes(self, items: Sequence[NeededItem]) -> int:
        """The memory that these items will take where they go."""
        return sum(self.memory.load_bytes(each.item) for each in items)

    def note_reading(self, now: ReadProgress) -> None:
        """Learn the disk's rate from what it has read since the last time."""
        nbytes, seconds = now.num_bytes - self._measured.num_bytes, now.busy_s - self._measured.busy_s
        if nbytes:
            self._measured = now
            self.rates.note_load(Tier.DISK, nbytes, seconds)

    def note_slow(self, before: ReadProgress, now: ReadProgress) -> None:
        """Learn the disk's rate from a load that was given up: even if nothing came, when it took long enough."""
        self._measured = now
        if (seconds := now.busy_s - before.busy_s) >= LEAST_WAIT_S:
            self.rates.note_load(Tier.DISK, max(1, now.num_bytes - before.num_bytes), seconds)

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for tier in (Tier.DEVICE, Tier.HOST):
            reserved = sum(load.reserved_bytes for load in self.loads) if tier is self.memory.load_tier else 0
            assert self.memory.reserved_bytes[tier] == reserved
        if self.memory.disk is not None:
            self.memory.disk.reader.check()
            assert self.loads or not self.memory.disk.reader.num_reads


class TierLoad(Generic[Key, Content]):
    """Brings content for one request up from a tier. The owner closes it, however it ends.

    `nbytes` have come into the tree, the last of them `load_s` after the start. A slow tier is given up early: time spent
    on useless reading stays below a tenth of what computing everything would have taken, as far as that is known.
    """

    def __init__(self, loader: Loader, trie: SaltTrie, reader: DiskReader[Key, Content], total: int) -> None:
        self.nbytes, self.load_s, self.reserved_bytes = 0, 0.0, 0
        self._loader, self._memory, self._trie = loader, loader.memory, trie
        self._total = total  # tokens of the prompt
        self._without = 0  # the offset that could be reached without this load
        self._reader, self._reads = reader, reader.open_list()
        self._started_s = self._alive_s = loader.clock()
        self._seen = reader.progress()  # when something came last, at `_alive_s`

    def make_room(self, nbytes: int) -> bool:
        """Reserve this many bytes in all where content goes; False if there is no room for more than now."""
        extra, loader = nbytes - self.reserved_bytes, self._loader
        if extra > 0:
            if self._memory.load_tier is Tier.HOST:
                has_room = loader.evictor.make_host_room(extra, self._trie)
            else:
                has_room = loader.room.make_room(extra, trie=self._trie)
            if not has_room:
                return False
        self.reserve(nbytes)
        return True

    def reserve(self, nbytes: int) -> None:
        """Reserve this many bytes in all; there is room for them."""
        self._trie.memory.reserve(self._memory.load_tier, nbytes - self.reserved_bytes)
        self.reserved_bytes = nbytes

    def take_room(self, nbytes: int) -> bool:
        """Turn this much of what is reserved into room for content that is put there now; False if it has no room."""
        if not self.make_room(max(self.reserved_bytes, nbytes)):
            return False
        self.reserve(self.reserved_bytes - nbytes)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until its tier has read something more, or the time is over. Any thread may wait."""
        self._reader.wait(timeout_s)

    def close(self) -> None:
        """Stop reading, and give back what is reserved. Content that has come stays in the tree. May be called twice."""
        self._reads.close()
        self.reserve(0)
        self._loader.loads.discard(self)

    def _note_arrived(self, nbytes: int) -> None:
        """Note bytes that have come into the tree, or none when the load is given up."""
        self.nbytes += nbytes
        self.load_s = self._loader.clock() - self._started_s

    def _is_worth_waiting(self, reached: int, target: int, left_bytes: int, arrived_bytes: int, *, is_sure: bool) -> bool:
        """Whether what is left should still be waited for, as it goes now.

        With what has come a lane could stand at `reached`, with all of it at `target`. `is_sure`: the tier has it.
        """
        if not self._is_alive():
            return False
        rates, elapsed_s = self._loader.rates, self._loader.clock() - self._started_s
        compute_s, won_s = rates.prefill_s(self._without, self._total), rates.prefill_s(self._without, reached)
        left_s = rates.prefill_s(reached, max(reached, target))
        if compute_s is None or won_s is None or left_s is None:
            return is_sure or elapsed_s <= UNKNOWN_S
        if elapsed_s <= LEAST_WAIT_S:
            return True
        if elapsed_s > WASTE * compute_s + won_s:
            return False
        return not arrived_bytes or left_bytes * elapsed_s / arrived_bytes <= left_s

    def _is_alive(self) -> bool:
        """Whether the tier has delivered something lately, for whatever load."""
        now, progress = self._loader.clock(), self._reader.progress()
        if progress.num_bytes != self._seen.num_bytes:
            self._seen, self._alive_s = progress, now
        return now - self._alive_s <= STALLED_S

    def _take_until(self) -> float:
        """When to stop putting what has arrived into the tree: other requests wait."""
        return self._loader.clock() + TAKE_S


def _first_of_runs(below: Sequence[NeededItem]) -> Iterator[NeededItem]:
    """The items at which content changes its group or tier: between them the cost is linear, so one is the best."""
    before: tuple[Group, Tier] | None = None
    for each in below:
        if (each.item.group, each.item.tier) != before:
            yield each
        before = each.item.group, each.item.tier
