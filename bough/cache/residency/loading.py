"""Loading: how much of a planned prefix is brought back from below the device, and the bringing itself.

A page that cannot be read, or is not what it should be, is a miss: the tree loses it, and the plan is made again with less.
The same happens, without a loss, when loading turns out to be slower than computing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from bough.cache.disk.errors import DiskMiss, DiskSlow
from bough.cache.residency.evictor import memory_of
from bough.cache.residency.memory import Item, content_bytes, span
from bough.cache.tree.node import Node
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Kind, Page, Place
from bough.cache.tree.trie import Trie
from bough.errors import EngineError
from bough.types import Loading

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache

log = logging.getLogger(__name__)

WASTE = 0.1
"""Reading that comes to nothing may cost this share of computing everything."""


@dataclass(frozen=True)
class Needed:
    """An item that restoring at some offset needs from the tree, and the node that holds it."""

    node: Node
    item: Item

    @property
    def start(self) -> int:
        """Without this item, a lane can stand at this offset at the most."""
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
    """How deep a lane should stand: not deeper than what is brought back sooner than computed."""

    offset: int
    loading: Loading


def choose_depth(cache: PrefixCache, path: Sequence[Node], matched: int, live: Live, offset: int, total: int) -> Depth:
    """The offset at or below `offset` from which the prompt's end is reached soonest, by the measured rates."""
    below = [each for each in needed(cache.groups, path, live, offset) if each.item.place is not Place.DEVICE]
    if not below:
        return Depth(offset, Loading())
    all_s = _load_s(cache, below)
    compute_s = cache.rates.prefill_s(0, total)
    if compute_s is None:
        return Depth(offset, Loading(estimated_load_s=all_s))

    def seconds(at: int) -> float:
        items = [each for each in needed(cache.groups, path, live, at) if each.item.place is not Place.DEVICE]
        return _load_s(cache, items) + (cache.rates.prefill_s(at, total) or 0.0)

    limits = {offset} | {each.start for each in _first_of_runs(below)}
    depths = {plan(cache.groups, path, matched, live, limit) for limit in limits}
    best = min(depths, key=lambda at: (seconds(at), -at))
    without = cache.rates.prefill_s(min(depths), offset) or 0.0
    return Depth(best, Loading(recomputed_tokens=offset - best, estimated_load_s=all_s, estimated_compute_s=without))


def _first_of_runs(below: Sequence[Needed]) -> Iterator[Needed]:
    """Where content begins to lie at another place: between those offsets, deeper is better or none is."""
    before: tuple[Group, Place] | None = None
    for each in below:
        if (each.item.group, each.item.place) != before:
            yield each
        before = each.item.group, each.item.place


def _load_s(cache: PrefixCache, items: Sequence[Needed]) -> float:
    return sum(content_bytes(each.item) * _byte_s(cache, each.item.place) for each in items)


def _byte_s(cache: PrefixCache, place: Place) -> float:
    """Seconds for a byte from this place to a lane; what lies on disk comes by way of the host."""
    measured = cache.rates.byte_s(place)
    if measured or place is Place.DISK or cache.tiers is None:
        return measured
    return cache.tiers.store.host_seconds_per_byte() or 0.0


def bytes_on_disk(cache: PrefixCache, path: Sequence[Node], live: Live, offset: int) -> int:
    """How much of what standing at `offset` needs has to be read first."""
    items = needed(cache.groups, path, live, offset) if cache.memory.disk is not None else ()
    return sum(content_bytes(each.item) for each in items if each.item.place is Place.DISK)


@dataclass
class Loader:
    """Brings back what one request needs, measuring as it goes.

    Whatever the disk does, it is left early enough: what was spent on reading in vain stays below a tenth of what computing
    everything would have taken, as far as that is known.
    """

    cache: PrefixCache
    trie: Trie
    total: int  # tokens of the prompt
    loading: Loading
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)

    def load(self, path: Sequence[Node], live: Live, offset: int) -> int:
        """Read what is on disk, where room was made for it; returns how deep the lane can stand at the most."""
        if self.cache.memory.disk is None:
            return offset
        items = [each for each in needed(self.cache.groups, path, live, offset) if each.item.place is Place.DISK]
        left = sum(content_bytes(each.item) for each in items)
        stand = partial(plan, self.cache.groups, path, offset, live)
        without = stand(min((each.start for each in items), default=0))
        for each in items:
            at = stand(each.start) if each.item.group.kind is Kind.FULL else without
            patience_s = self._patience_s(without, at)
            if patience_s <= 0 or self._is_too_slow(left, at, offset) or not self._load_one(each, patience_s):
                return each.start
            left -= content_bytes(each.item)
        return offset

    def _patience_s(self, without: int, at: int) -> float:
        """How long reading may still take if all of it was in vain from here on: a tenth of computing, and what was won."""
        compute_s, won_s = (self.cache.rates.prefill_s(without, end) for end in (self.total, at))
        if compute_s is None or won_s is None:
            return math.inf
        return WASTE * compute_s + won_s - self.loading.load_s

    def _is_too_slow(self, left_bytes: int, at: int, offset: int) -> bool:
        """Whether computing from `at` on would be done sooner than loading what is left, as it goes now."""
        if not self.loading.disk_bytes:
            return False
        compute_s = self.cache.rates.prefill_s(at, offset)
        pace = self.loading.load_s / self.loading.disk_bytes
        return compute_s is not None and left_bytes * pace > compute_s

    def note_host(self, path: Sequence[Node], live: Live, offset: int) -> None:
        """Count what the lane takes from the host."""
        items = [each.item for each in needed(self.cache.groups, path, live, offset)] if self.cache.tiers else []
        host_bytes = sum(content_bytes(item) for item in items if item.place is Place.HOST)
        self.loading = replace(self.loading, host_bytes=host_bytes)

    def _has_room(self, nbytes: int) -> bool:
        """Room on the device was made for sure before; on the host as far as it could be."""
        tiers = self.cache.tiers
        assert tiers is not None
        return tiers.load_place is Place.DEVICE or self.cache.memory.num_bytes[Place.HOST] + nbytes <= tiers.host_bytes

    def _load_one(self, each: Needed, patience_s: float) -> bool:
        started_s, size = self.clock(), content_bytes(each.item)
        if not self._has_room(size):
            return False
        try:
            fresh = memory_of(self.trie).load(each.item, lambda: self.clock() - started_s < patience_s)
        except (DiskMiss, ValueError):
            self._lose(each)
            return False
        except DiskSlow as slow:
            self._note(slow.done_bytes, self.clock() - started_s)
            return False
        except (EngineError, MemoryError) as error:
            log.warning("rows %s could not be brought back: %s", span(each.item), error)
            self.cache.counts.failed_loads += 1
            return False
        self._note(size, self.clock() - started_s)
        self.trie.exchange(each.node, each.item, fresh)
        return True

    def _lose(self, each: Needed) -> None:
        self.cache.counts.misses += 1
        if isinstance(each.item, Page):
            self.trie.lose(each.node, each.item)
        else:
            self.trie.drop_point(each.node, each.node.points[each.item.offset])

    def _note(self, nbytes: int, seconds: float) -> None:
        self.cache.rates.note_load(Place.DISK, nbytes, seconds)
        done = self.loading
        self.loading = replace(done, disk_bytes=done.disk_bytes + nbytes, load_s=done.load_s + seconds)
