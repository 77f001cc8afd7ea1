"""Loading: how much of a planned prefix is promoted from the tiers below the device, and bringing it back from disk.

The disk's threads read; the engine's thread looks between two steps what has arrived, and puts it into the tree. What a
request waits for has its bytes reserved. A page that cannot be read, or is not what it should be, is a miss: the tree loses
it, and the plan is made again with less. The same happens, without a loss, when loading turns out to be slower than
computing, or when nothing arrives at all.

Always true between calls (`check` asserts it): what is reserved in memory is what the loads under way have reserved, and
the disk reads nothing but what they want.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bough.cache.disk import Disk, DiskMiss
from bough.cache.disk.reader import Read, ReadProgress
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltTrie, saved_file
from bough.cache.residency.rates import Rates
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Node, Pin
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Item, Kind, Page, Tier
from bough.errors import EngineError
from bough.types import Loading

log = logging.getLogger(__name__)

WASTE = 0.1
"""Reading that is given up may cost this share of computing everything."""

LEAST_WAIT_S = 0.05
"""So long is always waited for the disk: nobody notices it, and a thread may take as long to be woken."""

STALLED_S = 5.0
"""A disk that delivers no byte for so long is not waited for, also if it is not known what computing takes."""

TAKE_S = 0.01
"""Putting what has arrived into the tree may take so long at a time: other requests wait meanwhile."""


@dataclass(frozen=True)
class Needed:
    """An item that restoring at some offset needs from the tree, and the node that holds it."""

    node: Node
    item: Item

    @property
    def start(self) -> int:
        """The deepest offset that a lane can stand at without this item."""
        return self.item.start if isinstance(self.item, Page) else max(0, self.item.offset - 1)


def needed(groups: Sequence[Group], path: Sequence[Node], live: Live, offset: int) -> Iterator[Needed]:
    """What a lane takes from the tree to stand at `offset`: states, then window rows, then the rows of full attention."""
    for group in sorted(groups, key=lambda group: -_URGENCY[group.kind]):
        if offset == 0 or (group.kind is not Kind.FULL and live.can_stand(group, offset)):
            continue
        if group.kind is Kind.RECURRENT:
            node = next(node for node in path if node.start < offset <= node.end)
            yield Needed(node, node.points[offset].states[group])
            continue
        start = live.shared if group.kind is Kind.FULL else group.first_needed(offset)
        for node in path:
            yield from (Needed(node, page) for page in node.pages_between(group, start, offset))


_URGENCY = {Kind.FULL: 0, Kind.WINDOW: 1, Kind.RECURRENT: 2}


@dataclass(frozen=True)
class Depth:
    """How deep a lane should stand: not deeper than what is loaded sooner than computed."""

    offset: int
    loading: Loading


@dataclass
class LoadCounts:
    """What could not be loaded: files that were not what they should be, loads without memory, and loads given up."""

    misses: int = 0
    failed_loads: int = 0
    slow_loads: int = 0


class Reserving(Protocol):
    """Something that brings content into memory, and has bytes reserved for it."""

    @property
    def reserved_bytes(self) -> int: ...


class Loader:
    """Decides what is worth loading; a `Load` does it for one request. `loads` are those under way, fetches included."""

    def __init__(
        self, memory: Memory, evictor: Evictor, rates: Rates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts = LoadCounts()
        self.memory = memory
        self.rates = rates
        self.clock = clock
        self.groups = memory.groups
        self.loads: set[Reserving] = set()
        self._evictor = evictor
        self._measured = ReadProgress()

    def choose_depth(self, path: Sequence[Node], matched: int, live: Live, offset: int, total: int) -> Depth:
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

    def _below_device(self, path: Sequence[Node], live: Live, offset: int) -> list[Needed]:
        return [each for each in needed(self.groups, path, live, offset) if each.item.tier is not Tier.DEVICE]

    def _load_s(self, items: Sequence[Needed]) -> float:
        return sum(each.item.content_bytes * self._byte_s(each.item.tier) for each in items)

    def _byte_s(self, tier: Tier) -> float:
        """Seconds for a byte from this tier to a lane; content on disk goes through the host."""
        measured = self.rates.byte_s(tier)
        if measured or tier is Tier.DISK or self.memory.tiers is None:
            return measured
        return self.memory.tiers.store.host_seconds_per_byte() or 0.0

    def on_disk(self, path: Sequence[Node], live: Live, offset: int) -> list[Needed]:
        """What has to be read before a lane can stand at `offset`, in the order in which it is wanted."""
        items = needed(self.groups, path, live, offset) if self.memory.disk is not None else ()
        return [each for each in items if each.item.tier is Tier.DISK]

    @property
    def tier(self) -> Tier:
        """Where content goes that is read from disk."""
        return self.memory.tiers.load_tier if self.memory.tiers is not None else Tier.DEVICE

    def loaded_bytes(self, items: Sequence[Needed]) -> int:
        """What these items will take where they go: on the device perhaps a whole block each."""
        if self.tier is not Tier.DEVICE:
            return total_bytes(items)
        return sum(self.memory.store.device_bytes(each.item) for each in items)

    def make_host_room(self, trie: SaltTrie, items: Sequence[Needed]) -> int | None:
        """Make room on the host for what is to be read; returns None, or where the first item starts that has none."""
        if self._evictor.make_host_room(total_bytes(items), trie):
            return None
        left = self._evictor.free_host_bytes(trie)
        for each in items:
            left -= each.item.content_bytes
            if left < 0:
                return each.start
        return None

    def note_reading(self, now: ReadProgress) -> None:
        """Learn the disk's rate from what it has read since the last time."""
        nbytes, seconds = now.num_bytes - self._measured.num_bytes, now.busy_s - self._measured.busy_s
        if nbytes:
            self._measured = now
            self.rates.note_load(Tier.DISK, nbytes, seconds)

    def note_slow(self, before: ReadProgress, now: ReadProgress) -> None:
        """Learn the disk's rate from a load that was given up: also if nothing came, when that was long enough to tell."""
        self._measured = now
        if (seconds := now.busy_s - before.busy_s) >= LEAST_WAIT_S:
            self.rates.note_load(Tier.DISK, max(1, now.num_bytes - before.num_bytes), seconds)

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for tier in (Tier.DEVICE, Tier.HOST):
            reserved = sum(load.reserved_bytes for load in self.loads) if tier is self.tier else 0
            assert self.memory.reserved_bytes[tier] == reserved
        if self.memory.disk is not None:
            self.memory.disk.reader.check()
            assert self.loads or not self.memory.disk.reader.num_reads


def total_bytes(items: Sequence[Needed]) -> int:
    """How much there is to move."""
    return sum(each.item.content_bytes for each in items)


class Load:
    """Loads what one request needs from disk, and measures it. The owner closes it, however it ends.

    A slow disk is given up early: time spent on useless reading stays below a tenth of what computing everything would
    have taken, as far as that is known.
    """

    def __init__(self, loader: Loader, trie: SaltTrie, total: int, loading: Loading) -> None:
        self.loading = loading
        self.reserved_bytes = 0
        self._loader = loader
        self._trie = trie
        self._total = total  # tokens of the prompt
        disk = loader.memory.disk
        self._reads = disk.reader.open_list() if disk is not None else None
        self._without: int | None = None  # the offset that could be reached without reading anything
        self._wanted_bytes = 0  # since the last start
        self._missing_bytes = 0  # what is not there yet of those
        self._arrived_bytes = 0  # up to the last start
        self._fetched_s = 0.0  # spent on the shared store, before
        self._started_s = 0.0
        self._before = self._seen = ReadProgress()  # of the reader: at the first start, and when something came last
        self._alive_s = 0.0  # when that was

    def reserve_host(self, items: Sequence[Needed]) -> int | None:
        """Reserve room on the host, if what is read goes there; returns None, or where the first item starts that has none.

        First of all: making room on the device may fill the host again.
        """
        if self._loader.tier is not Tier.HOST or not items:
            return None
        self._loader.loads.add(self)
        limit = self._loader.make_host_room(self._trie, items)
        if limit is None:
            self._reserve(self._loader.loaded_bytes(items))
        return limit

    def start(self, items: Sequence[Needed], without: int) -> None:
        """Want these items, for which there is room; `without` them a lane can stand at that offset. Reserves the room."""
        self._loader.loads.add(self)
        self._reserve(self._loader.loaded_bytes(items))
        self._wanted_bytes = self._missing_bytes = total_bytes(items)
        if self._without is None:
            self._without = without
            self._started_s = self._alive_s = self._loader.clock()
            self._before = self._seen = self._progress()
        self._want(items)

    def _progress(self) -> ReadProgress:
        disk = self._loader.memory.disk
        return disk.reader.progress() if disk is not None else ReadProgress()

    def lacks_room(self, items: Sequence[Needed]) -> bool:
        """Whether these items, which are not there yet, take more than is reserved."""
        return self._loader.loaded_bytes(items) > self.reserved_bytes

    def release_room(self) -> None:
        """Give back what is reserved, before it is planned again."""
        self._arrived_bytes += self._wanted_bytes - self._missing_bytes
        self._wanted_bytes = self._missing_bytes = 0
        self._reserve(0)

    def close(self) -> None:
        """Want nothing any more, and give back what is reserved. What has arrived stays in the tree."""
        if self._reads is not None:
            self._reads.close()
        self._reserve(0)
        self._loader.loads.discard(self)

    def advance(self, pin: Pin, live: Live, offset: int) -> int | None:
        """Put what has arrived into the tree; returns how deep the lane can stand now, or None if it has to wait.

        That is `offset` when all is there, and less if something is missing or waiting is no longer worth it.
        """
        disk, path = self._loader.memory.disk, pin.node.path()
        at = plan(self._loader.groups, path, pin.offset, live, offset)
        if at < offset or disk is None:  # what was on disk may have been cleared meanwhile
            return at
        items = self._loader.on_disk(path, live, offset)
        if items and (self._has_news(items) or total_bytes(items) < self._missing_bytes):  # or others have it in memory
            lost = self._take(disk, items)
            if lost is not None:
                return lost
            items = self._loader.on_disk(path, live, offset)
            self._want(items)
        missing = [each for each in items if not self._has_arrived(each)]  # once: more may arrive at any moment
        if missing and not self._is_worth_waiting(missing, pin, live, offset):
            return min(self._give_up(missing, pin, live), offset - 1)  # what it needs may lie on disk as well
        return None if items else offset

    def _want(self, items: Sequence[Needed]) -> None:
        if self._reads is None:
            return
        self._reserve(min(self.reserved_bytes, self._loader.loaded_bytes(items)))
        self._missing_bytes = min(self._missing_bytes, total_bytes(items))
        files = [saved_file(each.item) for each in items]
        self._reads.want([file for file in files if file is not None])

    def _has_news(self, items: Sequence[Needed]) -> bool:
        """Whether anything has arrived, or some item has lost its file."""
        assert self._reads is not None
        return self._reads.num_done > 0 or any(saved_file(each.item) is None for each in items)

    def _take(self, disk: Disk, items: Sequence[Needed]) -> int | None:
        """Put what has arrived into the tree, for a limited time; returns where the first item starts that failed."""
        assert self._reads is not None
        self._loader.note_reading(self._progress())
        until_s = self._loader.clock() + TAKE_S
        for each in items:
            file = saved_file(each.item)
            read = self._reads.find(file) if file is not None else None
            if file is not None and read is None:
                continue
            if not self._place(disk, each, read):
                return each.start
            if self._loader.clock() > until_s:
                break
        return None

    def _place(self, disk: Disk, each: Needed, read: Read[DiskFile, bytearray] | None) -> bool:
        """Put one item into the tree; False if that failed."""
        try:
            if read is None:
                raise DiskMiss("missing", "another part of it could not be read")
            data = disk.take(read)
            fresh = self._trie.memory.load(each.item, read.file, data)
        except (DiskMiss, ValueError):
            self._lose(each)
            return False
        except (EngineError, MemoryError) as error:
            log.warning("rows %s could not be loaded: %s", each.item.span, error)
            self._loader.counts.failed_loads += 1
            return False
        self._reserve(max(0, self.reserved_bytes - self._loader.loaded_bytes([each])))
        self._missing_bytes = max(0, self._missing_bytes - each.item.content_bytes)
        self._trie.replace(each.node, each.item, fresh)
        self._note(each.item.content_bytes)
        return True

    def _lose(self, each: Needed) -> None:
        self._loader.counts.misses += 1
        if isinstance(each.item, Page):
            self._trie.drop_page(each.node, each.item)
        else:
            self._trie.drop_point(each.node, each.node.points[each.item.offset])

    def _is_worth_waiting(self, items: Sequence[Needed], pin: Pin, live: Live, offset: int) -> bool:
        """Whether these items, which have not arrived, should still be waited for, as it goes now."""
        if not self._is_alive():
            return False
        without = self._without or 0
        at = self._reached(items, pin, live)
        rates, elapsed_s = self._loader.rates, self._loader.clock() - self._started_s
        compute_s, won_s = rates.prefill_s(without, self._total), rates.prefill_s(without, at)
        left_s = rates.prefill_s(at, offset)
        if compute_s is None or won_s is None or left_s is None or elapsed_s <= LEAST_WAIT_S:
            return True
        if elapsed_s > WASTE * compute_s + won_s:
            return False
        left_bytes = max(0, total_bytes(items) - (self._reads.partial_bytes if self._reads is not None else 0))
        arrived_bytes = self._arrived_bytes + self._wanted_bytes - left_bytes  # whoever has put it into the tree
        return not arrived_bytes or left_bytes * elapsed_s / arrived_bytes <= left_s

    def _has_arrived(self, each: Needed) -> bool:
        file = saved_file(each.item)
        return file is None or (self._reads is not None and self._reads.find(file) is not None)

    def _is_alive(self) -> bool:
        """Whether the disk has delivered something lately."""
        now, progress = self._loader.clock(), self._progress()
        if progress.num_bytes != self._seen.num_bytes:
            self._seen, self._alive_s = progress, now
        return now - self._alive_s <= STALLED_S

    def reached(self, pin: Pin, live: Live, offset: int) -> int:
        """How deep a lane could stand with what is in the tree now, of a load to `offset`."""
        path = pin.node.path()
        if (at := plan(self._loader.groups, path, pin.offset, live, offset)) < offset:
            return at  # something was cleared meanwhile
        items = self._loader.on_disk(path, live, offset)
        return self._reached(items, pin, live) if items else offset

    def _reached(self, items: Sequence[Needed], pin: Pin, live: Live) -> int:
        """How deep a lane could stand without these items: where states or windows are missing, as deep as before."""
        if items[0].item.group.kind is not Kind.FULL:
            return self._without or 0
        return plan(self._loader.groups, pin.node.path(), pin.offset, live, items[0].start)

    def _give_up(self, items: Sequence[Needed], pin: Pin, live: Live) -> int:
        """Wait for these items no longer; returns how deep the lane can stand without them."""
        self._loader.counts.slow_loads += 1
        self._loader.note_slow(self._before, self._progress())
        self._note(0)
        return self._reached(items, pin, live)

    def note_host(self, path: Sequence[Node], live: Live, offset: int) -> None:
        """Count what the lane takes from the host."""
        if self._loader.memory.tiers is None:
            return
        items = (each.item for each in needed(self._loader.groups, path, live, offset))
        host_bytes = sum(item.content_bytes for item in items if item.tier is Tier.HOST)
        self.loading = replace(self.loading, host_bytes=host_bytes)

    def note_planned(self, loading: Loading) -> None:
        """Take the figures of a plan that was made after something was fetched."""
        self.loading = replace(loading, store_bytes=self.loading.store_bytes, load_s=self.loading.load_s)

    def note_fetched(self, store_bytes: int, load_s: float) -> None:
        """So many bytes came from the shared store before."""
        self.loading = replace(self.loading, store_bytes=store_bytes, load_s=load_s)
        self._fetched_s = load_s

    def note_recomputed(self, num_tokens: int) -> None:
        """So many tokens were to be loaded, and are computed after all."""
        self.loading = replace(self.loading, recomputed_tokens=self.loading.recomputed_tokens + num_tokens)

    def _note(self, nbytes: int) -> None:
        load_s = self._fetched_s + self._loader.clock() - self._started_s
        self.loading = replace(self.loading, disk_bytes=self.loading.disk_bytes + nbytes, load_s=load_s)

    def _reserve(self, nbytes: int) -> None:
        self._trie.memory.reserve(self._loader.tier, nbytes - self.reserved_bytes)
        self.reserved_bytes = nbytes


def _first_of_runs(below: Sequence[Needed]) -> Iterator[Needed]:
    """Where content begins to lie in another tier: between those offsets, deeper is better or none is."""
    before: tuple[Group, Tier] | None = None
    for each in below:
        if (each.item.group, each.item.tier) != before:
            yield each
        before = each.item.group, each.item.tier
