"""The evictor: removes the least valuable content from a tier, when room is short there.

If there is a tier below, content is demoted: device → host → disk. If not, or if that has no room, content is dropped: a
leaf loses its tail, or a restore point goes. Making room below may in turn demote or drop content of the node that room was
made for: then that node is looked at again. But nothing here merges, splits or replaces nodes: a node that still has
content stays the same object in the same place, so that callers may keep the nodes that they have looked up.

Nothing here waits for the disk. Content that is not written yet is queued for writing and set aside, and other content that
is written goes first; only if there is none is the least valuable dropped. A candidate that waits comes back to its place
in the order when the first eviction after its write begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, covering_file, is_pending, saved_file
from bough.cache.residency.node_paths import PathAddresses
from bough.cache.residency.order import EvictionCandidate, Order
from bough.cache.residency.policy import (
    LRU,
    EvictionClass,
    Policy,
    classify,
    classify_demotion,
    classify_files,
    is_empty_leaf,
    redundant_point,
    tail_items,
    tail_start,
)
from bough.cache.residency.rates import Clock
from bough.cache.steps import Steps
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Node
from bough.cache.tree.state import Item, Tier
from bough.errors import EngineError

log = logging.getLogger(__name__)

MAX_REFUSED = 256
"""When this number of candidates could not be evicted, stale ones are forgotten; the next time at twice what is left."""


@dataclass
class EvictionCounts:
    """Restore points and tokens that were dropped, and bytes that were demoted to the host."""

    points: int = 0
    tokens: int = 0
    host_bytes: int = 0


class _Outcome(Enum):
    """The result for a candidate. A waiting one was set aside until it is written."""

    EVICTED = auto()
    WAITING = auto()
    REFUSED = auto()


class Evictor:
    """Evicts from the tiers of one memory, in the order of a policy."""

    def __init__(
        self,
        memory: Memory,
        forest: SaltForest,
        policy: Policy = LRU,
        *,
        salt_share: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self.memory = memory
        self.counts = EvictionCounts()
        self.order = Order(policy, by_trie=salt_share < 1)
        self._salt_share = salt_share
        self._forest = forest
        self._clock = clock or Clock()
        self._refused: list[tuple[Tier, EvictionCandidate]] = []
        self._refused_limit = MAX_REFUSED
        self._host_bytes = memory.host_budget_bytes
        self._tiers = [Tier.DEVICE] + [Tier.HOST] * bool(self._host_bytes) + [Tier.DISK] * bool(memory.disk)

    def offer(self, trie: SaltTrie, node: Node) -> None:
        """Enter a node into the order of every tier, or enter it again because it has changed."""
        node.stamp += 1
        trie.memory.note(node)
        for tier in self._tiers:
            kind = self._classify(node, tier)
            if kind is not None:
                self.order.enter(tier, kind, trie, node)

    def offer_filled(self, trie: SaltTrie, nodes: Iterable[Node]) -> None:
        """Offer nodes that have got rows; where none is missing any more, there are no holes."""
        for node in nodes:
            node.has_holes = node.has_holes and trie.lacks_rows(node)
            self.offer(trie, node)

    def _classify(self, node: Node, tier: Tier) -> EvictionClass | None:
        if tier is Tier.DISK:
            return classify_files(node)
        if tier is not self._tiers[-1]:
            return classify_demotion(node, tier)
        if len(self._tiers) > 1 and not is_empty_leaf(node) and not any(item.tier is tier for item in node.items()):
            return None
        return self._classify_drop(node)

    def _classify_drop(self, node: Node) -> EvictionClass | None:
        return classify(node, self._step_tokens, needs_points=self.memory.needs_points)

    @property
    def _step_tokens(self) -> int:
        return self.order.policy.step_tokens(self.memory.page_tokens)

    def evict_one(self, tier: Tier = Tier.DEVICE, trie: SaltTrie | None = None, *, spares_waiting: bool = False) -> bool:
        """Evict the least valuable content of a tier, or of one trie in it; False if nothing may be evicted.

        With `spares_waiting`, what still waits to be written is not dropped.
        """
        while (written := self.order.take_settled()) is not None:
            self.offer(written.trie, written.node)
        while (candidate := self.order.take(tier, trie)) is not None:
            outcome = self._evict(tier, candidate)
            if outcome is _Outcome.EVICTED:
                return True
            if outcome is _Outcome.REFUSED:
                self._remember_refused(tier, candidate)
        if self._evict_refused(tier, trie):
            return True
        if spares_waiting or len(self._tiers) == 1 or tier is Tier.DISK:
            return False
        return self._evict_waiting(tier, trie) or self._free_stuck(tier, trie)

    def _evict_waiting(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """When nothing is left that is written: demote the least valuable of what waits, or else drop it.

        On the host it may take the place of other content that waits. A candidate that can be neither demoted nor dropped
        stays set aside until it is written.
        """
        while (candidate := self.order.take(tier, trie, is_waiting=True)) is not None:
            if self._demote_to_host(tier, candidate, spares_waiting=False) or self._drop(candidate.trie, candidate.node):
                return True
        return False

    def _remember_refused(self, tier: Tier, candidate: EvictionCandidate) -> None:
        """Remember a candidate that could not be evicted now; those that were offered again since are forgotten."""
        if len(self._refused) >= self._refused_limit:
            self._refused = [(tier, candidate) for tier, candidate in self._refused if not candidate.is_stale]
            self._refused_limit = max(MAX_REFUSED, 2 * len(self._refused))
        self._refused.append((tier, candidate))

    def _evict_refused(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """Try again what was taken out of the order before and could not be evicted then."""
        refused, self._refused = self._refused, []
        has_evicted = False
        for refused_tier, candidate in refused:
            if candidate.is_stale:
                continue
            is_meant = not has_evicted and refused_tier is tier and trie in (None, candidate.trie)
            outcome = self._evict(tier, candidate) if is_meant else _Outcome.REFUSED
            if outcome is _Outcome.EVICTED:
                has_evicted = True
            elif outcome is _Outcome.REFUSED and not candidate.is_stale:
                self._refused.append((refused_tier, candidate))
        return has_evicted

    def _free_stuck(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """When nothing in the order can be evicted: drop leaves below content that could neither be demoted nor dropped.

        The disk takes nothing, or the tiers below are full of held content. A node with children cannot be dropped.
        """
        for each in [trie] if trie else list(self._forest.tries.values()):
            for node in each.walk():
                if self._tail(tier, node, take_kept=True):
                    leaves = [leaf for leaf in each.walk(node) if self._classify_drop(leaf) is not None]
                    oldest = min(leaves, key=self.order.policy.key, default=None)
                    if oldest is not None and self._drop(each, oldest):
                        return True
        return False

    def _evict(self, tier: Tier, candidate: EvictionCandidate) -> _Outcome:
        if tier is Tier.DISK:
            return self._evict_files(candidate)
        if tier is not self._tiers[-1]:
            outcome = self._demote(tier, candidate)
            if outcome is not _Outcome.REFUSED:
                return outcome
            if not self._demotable(tier, candidate):
                return outcome  # a lane stands on all of it: dropping content in tiers below would free nothing
        return _Outcome.EVICTED if self._drop(candidate.trie, candidate.node) else _Outcome.REFUSED

    def _drop(self, trie: SaltTrie, node: Node) -> bool:
        """Drop the least valuable part of a node; False if nothing of it may be dropped."""
        kind = self._classify_drop(node)
        if kind is None:
            return False
        if kind is not EvictionClass.REDUNDANT_POINT:
            return self._trim(trie, node, take_kept=kind is EvictionClass.KEPT_TAIL)
        point = redundant_point(node)
        assert point is not None
        trie.drop_point(node, point)
        self.counts.points += 1
        self.offer(trie, node)
        return True

    def _trim(self, trie: SaltTrie, leaf: Node, *, take_kept: bool) -> bool:
        end = leaf.end
        target = tail_start(leaf, self._step_tokens, needs_points=self.memory.needs_points, take_kept=take_kept)
        if target >= end:
            return False
        try:
            if target > leaf.start:
                trie.trim(leaf, target)
        except (EngineError, MemoryError) as error:
            log.warning("rows [%d, %d) stay: %s", target, end, error)
            return False
        self.counts.tokens += end - target
        if target > leaf.start:
            self.offer(trie, leaf)
        else:
            self.remove(trie, leaf)
        return True

    def remove(self, trie: SaltTrie, leaf: Node) -> None:
        """Remove a leaf, then the parts of its parents that no request can use any more."""
        self._drop_useless(trie, trie.remove(leaf))

    def _drop_useless(self, trie: SaltTrie, node: Node) -> None:
        """Drop the tail of a node that has lost a child, and of its parents, as far as no request can use it any more."""
        while self._has_useless_tail(node):
            target = max(node.deepest_point(node.end) or node.start, node.held_here_to)
            self.counts.tokens += node.end - target
            if target > node.start:
                with suppress(EngineError, MemoryError):  # then they stay, unused
                    trie.trim(node, target)
                break
            node = trie.remove(node)
        self.offer(trie, node)
        if node.is_root:
            self.forget_if_empty(trie)

    def clear(self, trie: SaltTrie, top: Node | None = None) -> Steps[int]:
        """Drop a whole trie, or a node and all below it, except for what busy lanes stand on; returns how many tokens.

        Content that requests add meanwhile may stay.
        """
        nodes, counts, num_dropped = list[Node](), trie.memory.census.counts, 0
        for node in trie.walk(top):
            nodes.append(node)
            yield
        for node in reversed(nodes):
            before, parent = counts.tokens, node.parent
            if trie.clear_leaf(node):
                self.offer(trie, node)
            elif node is top and parent is not None and counts.tokens < before:
                self._drop_useless(trie, parent)
            num_dropped += before - counts.tokens
            yield
        self.forget_if_empty(trie)
        return num_dropped

    def forget_if_empty(self, trie: SaltTrie) -> None:
        """Forget a trie that holds nothing and in which no lane stands."""
        if self._forest.remove_if_empty(trie):
            self.order.forget(trie)

    def _has_useless_tail(self, node: Node) -> bool:
        """Whether the node is a leaf whose last rows no restore point needs and no lane stands on."""
        if not self.memory.needs_points or node.is_root or not node.is_leaf:
            return False
        return max(node.deepest_point(node.end) or node.start, node.held_here_to) < node.end

    def _demote(self, tier: Tier, candidate: EvictionCandidate) -> _Outcome:
        """Move the tail of what a node holds in a tier to the next one that takes it; evicted if something has changed."""
        if self.memory.disk is not None:
            if self._demote_to_host(tier, candidate, spares_waiting=True):
                return _Outcome.EVICTED
            outcome = self._to_disk(tier, candidate)
            if outcome is not _Outcome.REFUSED:
                return outcome
        is_changed = self._demote_to_host(tier, candidate, spares_waiting=False)
        return _Outcome.EVICTED if is_changed else _Outcome.REFUSED

    def _demote_to_host(self, tier: Tier, candidate: EvictionCandidate, *, spares_waiting: bool) -> bool:
        """Move the tail of what a node holds on the device to the host, and make room there; True if something changed."""
        items = self._demotable(tier, candidate) if tier is Tier.DEVICE and self._host_bytes else []
        if not items:
            return False
        nbytes = sum(item.nbytes for item in items)
        has_room = self.make_host_room(nbytes, candidate.trie, spares_waiting=spares_waiting)
        return candidate.is_stale or (has_room and self._to_host(candidate, items, spares_waiting=spares_waiting))

    def demote_one(self) -> bool:
        """Demote the least valuable content of the device to the host, if that takes it; nothing is dropped."""
        while (candidate := self.order.take(Tier.DEVICE)) is not None:
            if self._demotable(Tier.DEVICE, candidate):  # else a lane stands on it; it is offered again when that ends
                is_changed = self._demote_to_host(Tier.DEVICE, candidate, spares_waiting=True)
                if not is_changed:
                    self.offer(candidate.trie, candidate.node)
                return is_changed
        return False

    def _demotable(self, tier: Tier, candidate: EvictionCandidate) -> list[Item]:
        node = candidate.node
        if candidate.kind is EvictionClass.REDUNDANT_POINT:
            point = redundant_point(node)
            return [state for state in point.states.values() if state.tier is tier] if point else []
        return self._tail(tier, node, take_kept=candidate.kind is EvictionClass.KEPT_TAIL)

    def _tail(self, tier: Tier, node: Node, *, take_kept: bool, is_saved: bool = False) -> list[Item]:
        """The last page of a node with something in a tier that no lane stands on, and that is saved, if asked."""
        return tail_items(
            node,
            tier,
            self.memory.page_tokens,
            held_to=self._forest.held_to(node),
            take_kept=take_kept,
            is_wanted=lambda item: not is_saved or saved_file(item) is not None,
        )

    def _to_host(self, candidate: EvictionCandidate, items: list[Item], *, spares_waiting: bool) -> bool:
        """Move items to the host; where the engine has no memory for them, something there is evicted first, once."""
        memory = candidate.trie.memory
        moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        self.counts.host_bytes += sum(moved)
        if not moved:
            if not self.evict_one(Tier.HOST, spares_waiting=spares_waiting) or candidate.is_stale:
                return candidate.is_stale
            moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        if moved:
            self.offer(candidate.trie, candidate.node)
        return bool(moved)

    def share_of(self, budget_bytes: int) -> int:
        """The part of a budget that one salt may have."""
        return int(self._salt_share * budget_bytes)

    def make_share(
        self, tier: Tier, trie: SaltTrie, nbytes: int, budget_bytes: int, *, spares_waiting: bool = False
    ) -> bool:
        """Make room in the share of a trie's salt, by evicting its own content; False if that cannot be done."""
        share = self.share_of(budget_bytes)
        while self._salt_share < 1 and trie.memory.used_bytes(tier) + nbytes > share:
            if nbytes > share or not self.evict_one(tier, trie, spares_waiting=spares_waiting):
                return False
        return True

    def free_host_bytes(self, trie: SaltTrie) -> int:
        """What is free on the host for a trie, in its salt's share too."""
        free_share = self.share_of(self._host_bytes) - trie.memory.used_bytes(Tier.HOST)
        return min(free_share, self._host_bytes - self.memory.used_bytes(Tier.HOST))

    def make_host_room(self, nbytes: int, trie: SaltTrie, *, spares_waiting: bool = False) -> bool:
        """Make room on the host; False if that cannot be done."""
        if not self.make_share(Tier.HOST, trie, nbytes, self._host_bytes, spares_waiting=spares_waiting):
            return False
        while self.memory.used_bytes(Tier.HOST) + nbytes > self._host_bytes:
            if nbytes > self._host_bytes or not self.evict_one(Tier.HOST, spares_waiting=spares_waiting):
                return False
        return True

    def _to_disk(self, tier: Tier, candidate: EvictionCandidate) -> _Outcome:
        """Demote the saved items of a node's tail, or else of the rest of it.

        If nothing is, the tail is queued for writing, ahead of all else, and the node is set aside until it is written.
        """
        node, trie = candidate.node, candidate.trie
        items = self._demotable(tier, candidate)
        take_kept = candidate.kind is EvictionClass.KEPT_TAIL
        saved = [item for item in items if saved_file(item) is not None]
        if saved := saved or self._tail(tier, node, take_kept=take_kept, is_saved=True):
            return self._demote_saved(candidate, saved)
        files = []
        for item in items:
            files.append(self._queue_write(trie, node, item))
            if candidate.is_stale:  # making room on disk has changed the node
                return _Outcome.EVICTED
            if saved_file(item) is not None:  # its file was about to be deleted; if it waited, that could be dropped again
                return self._demote_saved(candidate, [item])
        return self._wait(tier, candidate, [file for file in files if file is not None])

    def _demote_saved(self, candidate: EvictionCandidate, saved: Sequence[Item]) -> _Outcome:
        """Leave these items of a node to the disk, which has them."""
        for item in saved:
            candidate.trie.memory.demote_to_disk(item)
        self.offer(candidate.trie, candidate.node)
        return _Outcome.EVICTED

    def _wait(self, tier: Tier, candidate: EvictionCandidate, files: Sequence[DiskFile]) -> _Outcome:
        """Set a candidate aside until its files are written; refused if there are none."""
        if files:
            self.order.wait(tier, candidate, files)
        return _Outcome.WAITING if files else _Outcome.REFUSED

    def _queue_write(self, trie: SaltTrie, node: Node, item: Item) -> DiskFile | None:
        """The file that an item is being written to, ahead of all else; None if the disk does not take it."""
        disk = self.memory.disk
        assert disk is not None
        file = covering_file(item)
        if file is None:
            stamp = node.stamp
            if not self.make_disk_room(self.memory.file_bytes([item]), trie) or node.stamp != stamp:
                return None
            file = trie.memory.save(
                item, PathAddresses.of(disk, trie, node).address(item), self._clock.to_wall(node.last_used)
            )
        disk.prioritize(file)
        return None if file.has_failed else file

    def make_disk_room(self, nbytes: int, trie: SaltTrie) -> bool:
        """Make room on disk; False if that cannot be done, or the disk takes nothing now."""
        disk = self.memory.disk
        assert disk is not None
        if not disk.can_write or not self.make_share(Tier.DISK, trie, nbytes, disk.budget_bytes):
            return False
        while not disk.has_room(nbytes):
            if not disk.can_write or nbytes > disk.budget_bytes or not self.evict_one(Tier.DISK):
                return False
        return True

    def _evict_files(self, candidate: EvictionCandidate) -> _Outcome:
        """Evict the tail of a node's files: an item that is in memory too stays there, others are dropped.

        Files that are being written stay: two items would push each other's out, and neither would ever be saved.
        """
        node, trie = candidate.node, candidate.trie
        items = sorted((item for item in node.items() if item.files), key=lambda item: item.span[1])
        is_dropped = items[-1].tier is Tier.DISK if items else is_empty_leaf(node)
        if is_dropped and self._drop(trie, node):
            return _Outcome.EVICTED
        in_memory = [item for item in items if item.tier is not Tier.DISK]
        written = [item for item in in_memory if not any(is_pending(file) for file in item.files)]
        if not written:
            return self._wait(Tier.DISK, candidate, [file for item in in_memory for file in item.files if is_pending(file)])
        trie.memory.drop_files(written[-1])
        self.offer(trie, node)
        return _Outcome.EVICTED
