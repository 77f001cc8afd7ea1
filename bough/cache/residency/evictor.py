"""The evictor: removes the least valuable content from a tier, when room is short there.

Where a tier lies below, content is demoted: device → host → disk. Where none does, or it has no room, content is dropped: a
leaf loses its tail, or a restore point goes. Making room below may in turn demote or drop something there, and change the
node that room was made for: then that node is looked at again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from bough.cache.disk import Disk
from bough.cache.residency.addresses import PathAddresses
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, covering_file, saved_file
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
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Node
from bough.cache.tree.state import Item, Kind, Tier
from bough.errors import EngineError

log = logging.getLogger(__name__)

BACK_OFF_S = 30.0
"""After a disk has not written a page in time, evictions do not wait for it so long; what is not saved is dropped."""

MAX_REFUSED = 256
"""With so many candidates that could not be evicted, stale ones are forgotten; the next time at twice what is left."""


@dataclass
class EvictionCounts:
    """Restore points and tokens that were dropped, and bytes that were demoted."""

    points: int = 0
    tokens: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


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
        self._back_off_until = 0.0  # until then no eviction waits for the disk
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

    def evict_one(self, tier: Tier = Tier.DEVICE, trie: SaltTrie | None = None) -> bool:
        """Evict the least valuable content of a tier, or of one trie in it; False if nothing may be evicted."""
        while (candidate := self.order.take(tier, trie)) is not None:
            if self._evict(tier, candidate):
                return True
            self._note_refused(tier, candidate)
        if self._evict_refused(tier, trie):
            return True
        return len(self._tiers) > 1 and tier is not Tier.DISK and self._free_stuck(tier, trie)

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
            if is_meant and self._evict(tier, candidate):
                has_evicted = True
            elif candidate.node.stamp == stamp:
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

    def _evict(self, tier: Tier, candidate: Candidate) -> bool:
        if tier is Tier.DISK:
            return self._evict_files(candidate)
        if tier is not self._tiers[-1]:
            if self._demote(tier, candidate):
                return True
            if not self._demotable(tier, candidate):
                return False  # a lane stands on all that it has there: dropping what lies below would free nothing
        return self._drop(candidate)

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

    def clear(self, trie: SaltTrie) -> None:
        """Drop everything of a trie that no busy lane stands on."""
        trie.clear()
        for node in trie.walk():
            self.offer(trie, node)
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

    def _demote(self, tier: Tier, candidate: Candidate) -> bool:
        """Move the tail of what a node holds in a tier to the next one that takes it; True if something has changed."""
        node, stamp = candidate.node, candidate.node.stamp
        items = self._demotable(tier, candidate)
        if tier is Tier.DEVICE and self._host_bytes and items:
            has_room = self.make_host_room(sum(item.nbytes for item in items), candidate.trie)
            if node.stamp != stamp:
                return True
            if has_room and self._to_host(candidate, items):
                return True
            items = self._demotable(tier, candidate)
        if self.memory.disk is not None and items:
            return self._to_disk(candidate, items) or node.stamp != stamp
        return False

    def demote_one(self) -> bool:
        """Demote the least valuable content of the device to the host, if that takes it; nothing is dropped."""
        while (candidate := self.order.take(Tier.DEVICE)) is not None:
            items = self._demotable(Tier.DEVICE, candidate)
            if not items:  # a lane stands on it; it is offered again when that ends
                continue
            stamp = candidate.node.stamp
            has_room = self.make_host_room(sum(item.nbytes for item in items), candidate.trie)
            if candidate.node.stamp != stamp or (has_room and self._to_host(candidate, items)):
                return True
            self.offer(candidate.trie, candidate.node)
            return False
        return False

    def _demotable(self, tier: Tier, candidate: Candidate) -> list[Item]:
        node = candidate.node
        if candidate.kind is EvictionClass.REDUNDANT_POINT:
            point = redundant_point(node)
            return [state for state in point.states.values() if state.tier is tier] if point else []
        take_kept = candidate.kind is EvictionClass.KEPT_TAIL
        return tail_items(node, tier, self.page_tokens, held_to=self._forest.held_to(node), take_kept=take_kept)

    def _to_host(self, candidate: Candidate, items: list[Item]) -> bool:
        """Move items to the host; where the engine has no memory for them, something there is evicted first, once."""
        memory, node = candidate.trie.memory, candidate.node
        moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        self.counts.host_bytes += sum(moved)
        if not moved:
            stamp = node.stamp
            if not self.evict_one(Tier.HOST) or node.stamp != stamp:
                return node.stamp != stamp
            moved = [item.nbytes for item in items if memory.demote_to_host(item)]
        if moved:
            self.offer(candidate.trie, node)
        return bool(moved)

    def share_of(self, budget_bytes: int) -> int:
        """How much of a budget one salt may have."""
        return int(self._salt_share * budget_bytes)

    def make_share(self, tier: Tier, trie: SaltTrie, nbytes: int, budget_bytes: int) -> bool:
        """Make room for so many bytes in the share of a trie's salt, by evicting its own; False if that cannot be done."""
        share = self.share_of(budget_bytes)
        while self._salt_share < 1 and trie.memory.used_bytes(tier) + nbytes > share:
            if nbytes > share or not self.evict_one(tier, trie):
                return False
        return True

    def free_host_bytes(self, trie: SaltTrie) -> int:
        """What is free on the host for a trie, in its salt's share too."""
        free_share = self.share_of(self._host_bytes) - trie.memory.used_bytes(Tier.HOST)
        return min(free_share, self._host_bytes - self.memory.used_bytes(Tier.HOST))

    def make_host_room(self, nbytes: int, trie: SaltTrie) -> bool:
        """Make room on the host for so many bytes; False if that cannot be done."""
        if not self.make_share(Tier.HOST, trie, nbytes, self._host_bytes):
            return False
        while self.memory.used_bytes(Tier.HOST) + nbytes > self._host_bytes:
            if nbytes > self._host_bytes or not self.evict_one(Tier.HOST):
                return False
        return True

    def _to_disk(self, candidate: Candidate, items: list[Item]) -> bool:
        """Demote items that are saved, or can be saved now, to the disk; True if any could."""
        node, trie = candidate.node, candidate.trie
        memory, stamp, has_left = trie.memory, candidate.node.stamp, False
        for item in items:
            is_saved = self._is_saved(trie, node, item)
            if node.stamp != stamp:  # making room on disk has changed the node
                return True
            if not is_saved:
                continue
            self.counts.disk_bytes += item.nbytes
            memory.demote_to_disk(item)
            has_left = True
        if has_left:
            self.offer(trie, node)
        return has_left

    def _is_saved(self, trie: SaltTrie, node: Node, item: Item) -> bool:
        """Whether an item is on disk, after writing it there now if it was not."""
        disk = self.memory.disk
        assert disk is not None
        if saved_file(item) is not None:
            return True
        file = covering_file(item)
        if file is None:
            stamp = node.stamp
            if not self.make_disk_room(self.memory.file_bytes([item]), trie) or node.stamp != stamp:
                return False
            file = trie.memory.save(
                item, PathAddresses.of(disk, trie, node).address(item), self._clock.to_wall(node.last_used)
            )
        return self._wait_for(disk, file)

    def _wait_for(self, disk: Disk, file: DiskFile) -> bool:
        """Wait until a file is written; after a wait in vain no eviction waits for a while."""
        if time.monotonic() < self._back_off_until:
            return file.is_saved
        is_saved = disk.save(file)
        if not is_saved and not file.has_failed:
            self._back_off_until = time.monotonic() + BACK_OFF_S
        return is_saved

    def make_disk_room(self, nbytes: int, trie: SaltTrie) -> bool:
        """Make room on disk for so many bytes; False if that cannot be done, or the disk takes nothing now."""
        disk = self.memory.disk
        assert disk is not None
        if not self.make_share(Tier.DISK, trie, nbytes, disk.budget_bytes):
            return False
        while not disk.has_room(nbytes):
            if not disk.can_write or nbytes > disk.budget_bytes or not self.evict_one(Tier.DISK):
                return False
        return True

    def _evict_files(self, candidate: Candidate) -> bool:
        """Evict the tail of what a node has on disk: what is in memory too stays there, else it is dropped."""
        node, trie = candidate.node, candidate.trie
        items = sorted((item for item in node.items() if item.files), key=lambda item: item.span[1])
        if items and items[-1].tier is Tier.DISK and self._drop(candidate):
            return True
        if not items and is_empty_leaf(node):
            return self._drop(candidate)
        in_memory = [item for item in items if item.tier is not Tier.DISK]
        if not in_memory:
            return False
        trie.memory.drop_files(in_memory[-1])
        self.offer(trie, node)
        return True


def _below(node: Node) -> Iterator[Node]:
    """A node and all nodes below it."""
    stack = [node]
    while stack:
        yield (each := stack.pop())
        stack.extend(each.children.values())
