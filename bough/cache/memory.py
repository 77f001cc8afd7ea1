"""Memory: how many bytes the tree holds, and which of them go when room is short.

`Memory` stands between the tries and the engine's page store and counts every page and state that the tree holds. Evictions
are taken from a heap with lazy deletion: a node is offered again whenever something about it changes, which makes its older
entries stale. One eviction costs O(log n) of the number of nodes, and a look at the restore points of one node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bough.cache.eviction import LRU, Class, Key, Policy, classify, redundant_point, tail_start
from bough.cache.node import Node
from bough.cache.state import Group, Kind, Page, PageStore, State
from bough.cache.trie import Trie

_Entry = tuple[int, Key, int, int, Node, Trie]
Held = TypeVar("Held", Page, State)


@dataclass
class EvictionCounts:
    """How often each kind of eviction happened, and the tokens whose rows went."""

    points: int = 0
    trims: int = 0
    removals: int = 0
    tokens: int = 0


class Memory:
    """The tree's bytes, counted, and the order in which they would go.

    It is itself a page store: tries cut, join and release through it, so that no byte escapes the count.
    """

    def __init__(
        self,
        store: PageStore,
        page_tokens: int,
        policy: Policy = LRU,
        on_empty: Callable[[Trie], None] = lambda trie: None,
    ) -> None:
        self.groups: Sequence[Group] = store.groups
        self.page_tokens = page_tokens
        self.tree_bytes = 0
        self.counts = EvictionCounts()
        self.needs_points = any(group.kind is not Kind.FULL for group in self.groups)
        self._store = store
        self._policy = policy
        self._on_empty = on_empty
        self._heap: list[_Entry] = []
        self._sequence = 0
        self._num_offered = 0

    def take(self, item: Held) -> Held:
        """Count a page or state that a lane has just handed to the tree."""
        self.tree_bytes += item.nbytes
        return item

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        left, right = self._store.cut(page, at)
        self.tree_bytes -= page.nbytes
        return self.take(left), self.take(right)

    def join(self, left: Page, right: Page) -> Page:
        joined = self._store.join(left, right)
        self.tree_bytes -= left.nbytes + right.nbytes
        return self.take(joined)

    def release(self, item: Page | State) -> None:
        self.tree_bytes -= item.nbytes
        self._store.release(item)

    def offer(self, trie: Trie, node: Node) -> None:
        """Enter a node into the order, or enter it anew because it has changed."""
        node.stamp += 1
        kind = classify(node, self._step_tokens, needs_points=self.needs_points)
        if kind is None:
            return
        self._sequence += 1
        heapq.heappush(self._heap, (kind, self._policy.key(node), self._sequence, node.stamp, node, trie))
        if len(self._heap) > 64 and len(self._heap) > 4 * self._num_offered:
            self._rebuild()

    @property
    def _step_tokens(self) -> int:
        return self._policy.step_tokens(self.page_tokens)

    def use(self, policy: Policy) -> None:
        """Evict in another order from now on; nothing happens if it is the one in force."""
        if policy is self._policy:
            return
        self._policy = policy
        self._heap = [(e[0], policy.key(e[4]), *e[2:]) for e in self._heap if e[4].stamp == e[3]]
        heapq.heapify(self._heap)

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if entry[4].stamp == entry[3]]
        heapq.heapify(self._heap)
        self._num_offered = len(self._heap)

    def evict_one(self) -> bool:
        """Let the least valuable thing go; False if nothing may."""
        while self._heap:
            kind, _, _, stamp, node, trie = heapq.heappop(self._heap)
            if node.stamp == stamp and self._evict(Class(kind), node, trie):
                return True
        return False

    def _evict(self, kind: Class, node: Node, trie: Trie) -> bool:
        if kind is not Class.REDUNDANT_POINT:
            return self._trim(trie, node, take_kept=kind is Class.KEPT_TAIL)
        point = redundant_point(node)
        if point is not None:
            trie.drop_point(node, point)
            self.counts.points += 1
        self.offer(trie, node)
        return point is not None

    def _trim(self, trie: Trie, leaf: Node, *, take_kept: bool) -> bool:
        end = leaf.end
        target = tail_start(leaf, self._step_tokens, needs_points=self.needs_points, take_kept=take_kept)
        if target >= end:
            return False
        self.counts.tokens += end - target
        if target > leaf.start:
            trie.trim(leaf, target)
            self.counts.trims += 1
            self.offer(trie, leaf)
        else:
            self._remove(trie, leaf)
        return True

    def _remove(self, trie: Trie, leaf: Node) -> None:
        """Remove a leaf, then whatever of its parents serves nobody any more."""
        parent = trie.remove(leaf)
        self.counts.removals += 1
        while self._dangles(parent):
            target = max(parent.deepest_point(parent.end) or parent.start, parent.pinned_to)
            self.counts.tokens += parent.end - target
            if target > parent.start:
                trie.trim(parent, target)
                break
            parent = trie.remove(parent)
            self.counts.removals += 1
        self.settle(trie, parent)
        if parent.is_root and parent.is_leaf:
            self._on_empty(trie)

    def _dangles(self, node: Node) -> bool:
        """Whether the node is a leaf whose last rows no restore point needs and no lane stands on."""
        if not self.needs_points or node.is_root or not node.is_leaf:
            return False
        return max(node.deepest_point(node.end) or node.start, node.pinned_to) < node.end

    def settle(self, trie: Trie, node: Node) -> None:
        """Merge a node with its only child if both were last used together, and offer what is left."""
        if not node.is_root and len(node.children) == 1:
            (child,) = node.children.values()
            if child.last_used == node.last_used:
                node.stamp += 1
                node = trie.merge(node)
        self.offer(trie, node)
