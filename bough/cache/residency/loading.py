"""Loading: how much of a planned prefix is promoted from the tiers below the device, and the reading itself.

A page that cannot be read, or is not what it should be, is a miss: the tree loses it, and the plan is made again with less.
The same happens, without a loss, when loading turns out to be slower than computing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bough.cache.disk import DiskMiss, DiskSlow
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltTrie
from bough.cache.residency.rates import Rates
from bough.cache.tree.node import Node
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Item, Kind, Page, Tier
from bough.errors import EngineError
from bough.types import Loading

log = logging.getLogger(__name__)

WASTE = 0.1
"""Reading that is given up may cost this share of computing everything."""


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
    """What could not be loaded: files that were not what they should be, and loads without memory for them."""

    misses: int = 0
    failed_loads: int = 0


class Loader:
    """Decides what is worth loading; a `Load` does it for one request."""

    def __init__(
        self, memory: Memory, evictor: Evictor, rates: Rates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts = LoadCounts()
        self.memory = memory
        self.rates = rates
        self.clock = clock
        self.groups = memory.groups
        self._evictor = evictor

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

    def bytes_on_disk(self, path: Sequence[Node], live: Live, offset: int) -> int:
        """How much of what standing at `offset` needs has to be read first."""
        items = needed(self.groups, path, live, offset) if self.memory.disk is not None else ()
        return sum(each.item.content_bytes for each in items if each.item.tier is Tier.DISK)

    def make_room(self, trie: SaltTrie, nbytes: int) -> int:
        """Make room for what is to be read from disk; returns how much of it will have to fit on the device."""
        tiers = self.memory.tiers
        if tiers is None or tiers.load_tier is Tier.DEVICE:
            return nbytes
        self._evictor.make_host_room(nbytes, trie)
        return 0


@dataclass
class Load:
    """Loads what one request needs, and measures it.

    A slow disk is given up early: time spent on useless reading stays below a tenth of what computing everything would
    have taken, as far as that is known.
    """

    loader: Loader
    trie: SaltTrie
    total: int  # tokens of the prompt
    loading: Loading

    def run(self, path: Sequence[Node], live: Live, offset: int) -> int:
        """Read what is on disk, where room was made for it; returns the deepest offset that the lane can stand at."""
        groups = self.loader.groups
        if self.loader.memory.disk is None:
            return offset
        items = [each for each in needed(groups, path, live, offset) if each.item.tier is Tier.DISK]
        left = sum(each.item.content_bytes for each in items)
        stand = partial(plan, groups, path, offset, live)
        without = stand(min((each.start for each in items), default=0))
        for each in items:
            at = stand(each.start) if each.item.group.kind is Kind.FULL else without
            patience_s = self._patience_s(without, at)
            if patience_s <= 0 or self._is_too_slow(left, at, offset) or not self._load_one(each, patience_s):
                return each.start
            left -= each.item.content_bytes
        return offset

    def _patience_s(self, without: int, at: int) -> float:
        """How long reading may still take if the rest of it is useless: a tenth of computing, and the time saved so far."""
        compute_s, won_s = (self.loader.rates.prefill_s(without, end) for end in (self.total, at))
        if compute_s is None or won_s is None:
            return math.inf
        return WASTE * compute_s + won_s - self.loading.load_s

    def _is_too_slow(self, left_bytes: int, at: int, offset: int) -> bool:
        """Whether computing from `at` on would be done sooner than loading what is left, as it goes now."""
        if not self.loading.disk_bytes:
            return False
        compute_s = self.loader.rates.prefill_s(at, offset)
        pace = self.loading.load_s / self.loading.disk_bytes
        return compute_s is not None and left_bytes * pace > compute_s

    def note_host(self, path: Sequence[Node], live: Live, offset: int) -> None:
        """Count what the lane takes from the host."""
        if self.loader.memory.tiers is None:
            return
        items = (each.item for each in needed(self.loader.groups, path, live, offset))
        host_bytes = sum(item.content_bytes for item in items if item.tier is Tier.HOST)
        self.loading = replace(self.loading, host_bytes=host_bytes)

    def _has_room(self, nbytes: int) -> bool:
        """Room on the device was made for sure before; on the host as far as it could be."""
        memory = self.loader.memory
        return not memory.has_host or memory.num_bytes[Tier.HOST] + nbytes <= memory.host_budget_bytes

    def _load_one(self, each: Needed, patience_s: float) -> bool:
        clock = self.loader.clock
        started_s, size = clock(), each.item.content_bytes
        if not self._has_room(size):
            return False
        try:
            fresh = self.trie.memory.load(each.item, lambda: clock() - started_s < patience_s)
        except (DiskMiss, ValueError):
            self._lose(each)
            return False
        except DiskSlow as slow:
            self._note(slow.done_bytes, clock() - started_s)
            return False
        except (EngineError, MemoryError) as error:
            log.warning("rows %s could not be loaded: %s", each.item.span, error)
            self.loader.counts.failed_loads += 1
            return False
        self._note(size, clock() - started_s)
        self.trie.replace(each.node, each.item, fresh)
        return True

    def _lose(self, each: Needed) -> None:
        self.loader.counts.misses += 1
        if isinstance(each.item, Page):
            self.trie.drop_page(each.node, each.item)
        else:
            self.trie.drop_point(each.node, each.node.points[each.item.offset])

    def _note(self, nbytes: int, seconds: float) -> None:
        self.loader.rates.note_load(Tier.DISK, nbytes, seconds)
        done = self.loading
        self.loading = replace(done, disk_bytes=done.disk_bytes + nbytes, load_s=done.load_s + seconds)


def _first_of_runs(below: Sequence[Needed]) -> Iterator[Needed]:
    """Where content begins to lie in another tier: between those offsets, deeper is better or none is."""
    before: tuple[Group, Tier] | None = None
    for each in below:
        if (each.item.group, each.item.tier) != before:
            yield each
        before = each.item.group, each.item.tier
