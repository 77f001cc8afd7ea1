"""The evictor: removes the least valuable content from a tier, when room is short there.

Where a tier lies below, content is demoted: device → host → disk. Where none does, or it has no room, content is dropped: a
leaf loses its tail, or a restore point goes. Making room below may in turn demote or drop something there, and change the
node that room was made for: then that node is looked at again.

Nothing here waits for the disk. Content that is not written yet is queued for writing and set aside, and other content that
is written goes first; only if there is none is the least valuable dropped. What was set aside comes back to its place in
the order when the first eviction after its write begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from bough.cache.residency.addresses import PathAddresses
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, covering_file, is_pending, saved_file
from bough.cache.residency.order import Candidate, Order
from bough.cache.residency.policy import (
    LRU,
    EvictionClass,
    Policy,
    classify,
    classify_demotion,
    classify_files,
    is_empty_leaf,
    items_at,
    redundant_point,
    tail_items,
    tail_start,
)
from bough.cache.residency.rates import Clock
from bough.cache.steps import Steps
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Node
from bough.cache.tree.state import Item, Kind, Tier
from bough.errors import EngineError

log = logging.getLogger(__name__)

MAX_REFUSED = 256
"""With so many candidates that could not be evicted, stale ones are forgotten; the next time at twice what is left."""


@dataclass
class EvictionCounts:
    """Restore points and tokens that were dropped, and bytes that were demoted."""

    points: int = 0
    tokens: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


class _Outcome(Enum):
    """What became of a candidate. A waiting one was set aside until it is written."""

    EVICTED = auto()
    WAITING = auto()
    REFUSED = auto()


class Evictor:
    """Evicts from the tiers of one memory, in the order of a policy."""

    def __init__(
        self,
        memory: Memory,
        forest: SaltForest,
        page_tokens: int,
        policy: Policy = LRU,
        *,
        salt_share: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self.memory = memory
        self.page_tokens = page_tokens
        self.counts = EvictionCounts()
        self.needs_points = any(group.kind is not Kind.FULL for group in memory.groups)
        self.order = Order(policy, by_trie=salt_share < 1)
        self._salt_share = salt_share
        self._forest = forest
        self._clock = clock or Clock()
        self._refused: list[tuple[Tier, Candidate, int]] = []
        self._refused_limit = MAX_REFUSED
        self._host_bytes = memory.host_budget_bytes
        self._tiers = [Tier.DEVICE] + [Tier.HOST] * bool(self._host_bytes) + [Tier.DISK] * bool(memory.disk)

    @property
    def _step_tokens(self) -> int:
        return self.order.policy.step_tokens(self.page_tokens)

    def offer(self, trie: SaltTrie, node: Node) -> None:
        """Enter a node into the order of every tier, or enter it again because it has changed."""
        node.stamp += 1
        trie.note(node)
        for tier in self._tiers:
            kind = self._classify(node, tier)
            if kind is not None:
                self.order.enter(tier, kind, trie, node)

    def _classify(self, node: Node, tier: Tier) -> EvictionClass | None:
        if tier is Tier.DISK:
            return classify_files(node)
        if tier is not self._tiers[-1]:
            return classify_demotion(node, tier)
        if len(self._tiers) > 1 and not any(items_at(node, tier)) and not is_empty_leaf(node):
            return None
        return classify(node, self._step_tokens, needs_points=self.needs_points)

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
                self._note_refused(tier, candidate)
        if self._evict_refused(tier, trie):
            return True
        if spares_waiting or len(self._tiers) == 1 or tier is Tier.DISK:
            return False
        return self._evict_waiting(tier, trie) or self._free_stuck(tier, trie)

    def _evict_waiting(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """When nothing is left that is written: let the least valuable of what waits take the place of waiting content on
        the host, or else drop it. What can be neither stays set aside until it is written.
        """
        while (candidate := self.order.take(tier, trie, is_waiting=True)) is not None:
            if self._demote_to_host(tier, candidate, spares_waiting=False) or self._drop(candidate):
                return True
        return False

    def _note_refused(self, tier: Tier, candidate: Candidate) -> None:
        """Remember a candidate that could not be evicted now; those that were offered again since are forgotten."""
        if len(self._refused) >= self._refused_limit:
            self._refused = [entry for entry in self._refused if entry[1].node.stamp == entry[2]]
            self._refused_limit = max(MAX_REFUSED, 2 * len(self._refused))
        self._refused.append((tier, candidate, candidate.node.stamp))

    def _evict_refused(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """Try again what was taken out of the order before and could not be evicted then."""
        refused, self._refused = self._refused, []
        has_evicted = False
        for entry in refused:
            where, candidate, stamp = entry
            if candidate.node.stamp != stamp:
                continue  # it has been offered since
            is_meant = not has_evicted and where is tier and trie in (None, candidate.trie)
            outcome = self._evict(tier, candidate) if is_meant else _Outcome.REFUSED
            if outcome is _Outcome.EVICTED:
                has_evicted = True
            elif outcome is _Outcome.REFUSED and candidate.node.stamp == stamp:
                self._refused.append(entry)
        return has_evicted

    def _free_stuck(self, tier: Tier, trie: SaltTrie | None) -> bool:
        """When nothing in the order can be evicted: drop leaves below content that could neither be demoted nor dropped.

        The disk takes nothing, or the tiers below are full of pinned content. A node with children cannot be dropped.
        """
        for each in [trie] if trie else list(self._forest.tries.values()):
            for node in each.walk():
                if tail_items(node, tier, self.page_tokens, held_to=self._forest.held_to(node), take_kept=True):
                    leaves = [leaf for leaf in _below(node) if self._is_evictable(leaf)]
                    oldest = min(leaves, key=self.order.policy.key, default=None)
                    if oldest is not None and self._drop(Candidate(EvictionClass.TAIL, oldest, each)):
                        return True
        return False

    def _is_evictable(self, node: Node) -> bool:
        return classify(node, self._step_tokens, needs_points=self.needs_points) is not None

    def _evict(self, tier: Tier, candidate: Candidate) -> _Outcome:
        if tier is Tier.DISK:
            return self._evict_files(candidate)
        if tier is not self._tiers[-1]:
            outcome = self._demote(tier, candidate)
            if outcome is not _Outcome.REFUSED:
                return outcome
            if not self._demotable(tier, candidate):
                return outcome  # a lane stands on all that it has there: dropping what lies below would free nothing
        return _Outcome.EVICTED if self._drop(candidate) else _Outcome.REFUSED

    def _drop(self, candidate: Candidate) -> bool:
        """Drop the least valuable part of a node."""
        node, trie = candidate.node, candidate.trie
        kind = classify(node, self._step_tokens, needs_points=self.needs_points)
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
        target = tail_start(leaf, self._step_tokens, needs_points=self.needs_points, take_kept=take_kept)
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
        parent = trie.remove(leaf)
        while self._has_useless_tail(parent):
            target = max(parent.deepest_point(parent.end) or parent.start, parent.pinned_to)
            self.counts.tokens += parent.end - target
            if target > parent.start:
                with suppress(EngineError, MemoryError):  # then they stay, unused
                    trie.trim(parent, target)
                break
            parent = trie.remove(parent)
        self.settle(trie, parent)
        if parent.is_root:
            self.forget_if_empty(trie)

    def clear(self, trie: SaltTrie) -> Steps[None]:
        """Drop everything of a trie that no busy lane stands on. What requests add meanwhile may stay."""
        nodes = []
        for node in trie.walk():
            nodes.append(node)
            yield
        for node in reversed(nodes):
            if trie.clear_leaf(node):
                self.offer(trie, node)
            yield
        self.forget_if_empty(trie)

    def forget_if_empty(self, trie: SaltTrie) -> None:
        """Forget a trie that holds nothing and in which no lane stands."""
        if self._forest.remove_if_empty(trie):
            self.order.forget(trie)

    def _has_useless_tail(self, node: Node) -> bool:
        """Whether the node is a leaf whose last rows no restore point needs and no lane stands on."""
        if not self.needs_points or node.is_root or not node.is_leaf:
            return False
        return max(node.deepest_point(node.end) or node.start, node.pinned_to) < node.end

    def settle(self, trie: SaltTrie, node: Node) -> None:
        """Merge a node with its only child if both were last used together, and offer what is left."""
        if not node.is_root and len(node.children) == 1:
            (child,) = node.children.values()
            if child.last_used == node.last_used:
                node.stamp += 1
                node = trie.merge(node)
        self.offer(trie, node)

    def _demote(self, tier: Tier, candidate: Candidate) -> _Outcome:
        """Move the tail of what a node holds in a tier to the next one that takes it; evicted if something has changed."""
        if self.memory.disk is not None:
            if self._demote_to_host(tier, candidate, spares_waiting=True):
                return _Outcome.EVICTED
            outcome = self._to_disk(tier, candidate)
            if outcome is not _Outcome.REFUSED:
                return outcome
        is_changed = self._demote_to_host(tier, candidate, spares_waiting=False)
        return _Outcome.EVICTED if is_changed else _Outcome.REFUSED

    def _demote_to_host(self, tier: Tier, candidate: Candidate, *, spares_waiting: bool) -> bool:
        """Move the tail of what a node holds on the device to the host, and make room there; True if something changed."""
        node, stamp = candidate.node, candidate.node.stamp
        items = self._demotable(tier, candidate) if tier is Tier.DEVICE and self._host_bytes else []
        if not items:
            return False
        nbytes = sum(item.nbytes for item in items)
        has_room = self.make_host_room(nbytes, candidate.trie, spares_waiting=spares_waiting)
        return node.stamp != stamp or (has_room and self._to_host(candidate, items, spares_waiting=spares_waiting))

    def demote_one(self) -> bool:
        """Demote the least valuable content of the device to the host, if that takes it; nothing is dropped."""
        while (candidate := self.order.take(Tier.DEVICE)) is not None:
            if not self._demotable(Tier.DEVICE, candidate):  # a lane stands on it; it is offered again when that ends
                continue
            if self._demote_to_host(Tier.DEVICE, candidate, spares_waiting=True):
                return True
            self.offer(candidate.trie, candidate.node)
            return False
        return False

    def _demotable(self, tier: Tier, candidate: Candidate) -> list[Item]:
        node = candidate.node
        if candidate.kind is EvictionClass.REDUNDANT_POINT:
            point = redundant_point(node)
            return [state for state in point.states.values() if state.tier is tier] if point else []
        return self._tail(tier, candidate)

    def _tail(self, tier: Tier, candidate: Candidate, *, is_saved: bool = False) -> list[Item]:
        """The last page of a node with something in a tier that no lane stands on, and that is saved, if asked."""
        node, take_kept = candidate.node, candidate.kind is EvictionClass.KEPT_TAIL
        return tail_items(
            node,
            tier,
            self.page_tokens,
            held_to=self._forest.held_to(node),
            take_kept=take_kept,
            is_wanted=lambda item: not is_saved or saved_file(item) is not None,
        )

    def _to_host(self, candidate: Candidate, items: list[Item], *, spares_waiting: bool) -> bool:
        """Move items to the host; where the engine has no memory for them, something there is evicted first, once."""
        memory, node = candidate.trie.memory, candidate.node
        moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        self.counts.host_bytes += sum(moved)
        if not moved:
            stamp = node.stamp
            if not self.evict_one(Tier.HOST, spares_waiting=spares_waiting) or node.stamp != stamp:
                return node.stamp != stamp
            moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        if moved:
            self.offer(candidate.trie, node)
        return bool(moved)

    def share_of(self, budget_bytes: int) -> int:
        """How much of a budget one salt may have."""
        return int(self._salt_share * budget_bytes)

    def make_share(
        self, tier: Tier, trie: SaltTrie, nbytes: int, budget_bytes: int, *, spares_waiting: bool = False
    ) -> bool:
        """Make room for so many bytes in the share of a trie's salt, by evicting its own; False if that cannot be done."""
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
        """Make room on the host for so many bytes; False if that cannot be done."""
        if not self.make_share(Tier.HOST, trie, nbytes, self._host_bytes, spares_waiting=spares_waiting):
            return False
        while self.memory.used_bytes(Tier.HOST) + nbytes > self._host_bytes:
            if nbytes > self._host_bytes or not self.evict_one(Tier.HOST, spares_waiting=spares_waiting):
                return False
        return True

    def _to_disk(self, tier: Tier, candidate: Candidate) -> _Outcome:
        """Demote what is saved of a node's tail, or else of the rest of it. If nothing is, the tail is queued for writing,
        ahead of all else, and the node is set aside until it is written.
        """
        node, trie, stamp = candidate.node, candidate.trie, candidate.node.stamp
        items = self._demotable(tier, candidate)
        saved = [item for item in items if saved_file(item) is not None] or self._tail(tier, candidate, is_saved=True)
        if saved:
            return self._demote_saved(candidate, saved)
        files = []
        for item in items:
            files.append(self._queue_write(trie, node, item))
            if node.stamp != stamp:  # making room on disk has changed the node
                return _Outcome.EVICTED
            if saved_file(item) is not None:  # its file was about to be deleted; if it waited, that could be dropped again
                return self._demote_saved(candidate, [item])
        return self._wait(tier, candidate, [file for file in files if file is not None])

    def _demote_saved(self, candidate: Candidate, saved: Sequence[Item]) -> _Outcome:
        """Leave these items of a node to the disk, which has them."""
        self.counts.disk_bytes += sum(item.nbytes for item in saved)
        for item in saved:
            candidate.trie.memory.demote_to_disk(item)
        self.offer(candidate.trie, candidate.node)
        return _Outcome.EVICTED

    def _wait(self, tier: Tier, candidate: Candidate, files: Sequence[DiskFile]) -> _Outcome:
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
        """Make room on disk for so many bytes; False if that cannot be done, or the disk takes nothing now."""
        disk = self.memory.disk
        assert disk is not None
        if not disk.can_write or not self.make_share(Tier.DISK, trie, nbytes, disk.budget_bytes):
            return False
        while not disk.has_room(nbytes):
            if not disk.can_write or nbytes > disk.budget_bytes or not self.evict_one(Tier.DISK):
                return False
        return True

    def _evict_files(self, candidate: Candidate) -> _Outcome:
        """Evict the tail of what a node has on disk: what is in memory too stays there, else it is dropped.

        Files that are being written stay: two items would push each other's out, and neither would ever be saved.
        """
        node, trie = candidate.node, candidate.trie
        items = sorted((item for item in node.items() if item.files), key=lambda item: item.span[1])
        is_dropped = items[-1].tier is Tier.DISK if items else is_empty_leaf(node)
        if is_dropped and self._drop(candidate):
            return _Outcome.EVICTED
        in_memory = [item for item in items if item.tier is not Tier.DISK]
        written = [item for item in in_memory if not any(is_pending(file) for file in item.files)]
        if not written:
            return self._wait(Tier.DISK, candidate, [file for item in in_memory for file in item.files if is_pending(file)])
        trie.memory.drop_files(written[-1])
        self.offer(trie, node)
        return _Outcome.EVICTED


def _below(node: Node) -> Iterator[Node]:
    """A node and all nodes below it."""
    stack = [node]
    while stack:
        yield (each := stack.pop())
        stack.extend(each.children.values())
