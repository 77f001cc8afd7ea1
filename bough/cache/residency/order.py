"""The order of eviction: for each tier a heap of nodes, the least valuable first.

Deletion is lazy: a node is entered again whenever something about it changes, which makes its older entries stale. Taking
the next one costs O(log n) of the number of nodes. Candidates whose content is not written to disk yet wait in heaps of
their own, and in a queue in the order of writing; they are entered again as soon as their writes are settled.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.cache.residency.memory import SaltTrie
from bough.cache.residency.policy import EvictionClass, Key, Policy
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Node
from bough.cache.tree.state import Tier

FEW_ENTRIES = 8
"""A heap of at most this length keeps stale entries: where salts have shares, each salt has a heap for each tier."""

MAX_WAITING = 256
"""When this number of candidates wait for writes, stale ones are forgotten; the next time at twice what is left."""


class EvictionCandidate(NamedTuple):
    """A node from which something may be evicted, and what. It is stale if the node has been offered since."""

    kind: EvictionClass
    node: Node
    trie: SaltTrie
    stamp: int

    @property
    def is_stale(self) -> bool:
        return self.node.stamp != self.stamp


class _Entry(NamedTuple):
    """Sorted by the class, then by the policy's key, then by age; two entries never compare their candidates."""

    kind: EvictionClass
    key: Key
    sequence: int
    candidate: EvictionCandidate


@dataclass
class _Heap:
    entries: list[_Entry] = field(default_factory=list)
    num_fresh: int = 0  # entries when stale ones were last removed

    def push(self, entry: _Entry) -> None:
        heapq.heappush(self.entries, entry)
        if len(self.entries) > FEW_ENTRIES and len(self.entries) > 4 * self.num_fresh:
            self.keep([entry for entry in self.entries if not entry.candidate.is_stale])
            self.num_fresh = len(self.entries)

    def keep(self, entries: list[_Entry]) -> None:
        self.entries = entries
        heapq.heapify(self.entries)

    def peek(self) -> EvictionCandidate | None:
        """The first candidate that is not stale."""
        while self.entries and self.entries[0].candidate.is_stale:
            heapq.heappop(self.entries)
        return self.entries[0].candidate if self.entries else None


@dataclass(frozen=True)
class _Waiting:
    """A candidate, and the files whose writes it waits for."""

    candidate: EvictionCandidate
    files: Sequence[DiskFile]

    @property
    def is_settled(self) -> bool:
        """Whether each file is written, has failed, or is no longer wanted."""
        return all(file.is_saved or file.has_failed or not file.num_users for file in self.files)


class Order:
    """Candidates by tier, over all tries and, where salts have shares, for each trie."""

    def __init__(self, policy: Policy, *, by_trie: bool = False) -> None:
        self.policy = policy
        self._by_trie = by_trie
        self._heaps: dict[tuple[Tier, SaltTrie | None, bool], _Heap] = defaultdict(_Heap)  # True: those that wait
        self._waiting: deque[_Waiting] = deque()
        self._waiting_limit = MAX_WAITING
        self._sequence = 0

    def __len__(self) -> int:
        return sum(len(heap.entries) for heap in self._heaps.values())

    def enter(self, tier: Tier, kind: EvictionClass, trie: SaltTrie, node: Node) -> None:
        """Enter a node as it is now; entries from before its last change are stale."""
        self._push(tier, EvictionCandidate(kind, node, trie, node.stamp), is_waiting=False)

    def _push(self, tier: Tier, candidate: EvictionCandidate, *, is_waiting: bool) -> None:
        self._sequence += 1
        entry = _Entry(candidate.kind, self.policy.key(candidate.node), self._sequence, candidate)
        self._heaps[tier, None, is_waiting].push(entry)
        if self._by_trie:
            self._heaps[tier, candidate.trie, is_waiting].push(entry)

    def wait(self, tier: Tier, candidate: EvictionCandidate, files: Sequence[DiskFile]) -> None:
        """Set a candidate that was taken out aside, until these files are written or have failed."""
        self._push(tier, candidate, is_waiting=True)
        if len(self._waiting) >= self._waiting_limit:
            self._waiting = deque(each for each in self._waiting if not each.candidate.is_stale)
            self._waiting_limit = max(MAX_WAITING, 2 * len(self._waiting))
        self._waiting.append(_Waiting(candidate, files))

    def take_settled(self) -> EvictionCandidate | None:
        """The next candidate whose writes are settled, in the order of writing. Costs what is settled or stale."""
        while self._waiting and (self._waiting[0].candidate.is_stale or self._waiting[0].is_settled):
            if not (candidate := self._waiting.popleft().candidate).is_stale:
                return candidate
        return None

    def take(self, tier: Tier, trie: SaltTrie | None = None, *, is_waiting: bool = False) -> EvictionCandidate | None:
        """The least valuable candidate, which is taken out; of one trie only, or of those that wait, if asked."""
        heap = self._heaps[tier, trie, is_waiting]
        candidate = heap.peek()
        if candidate is not None:
            heapq.heappop(heap.entries)
        return candidate

    def peek(self, tier: Tier) -> EvictionCandidate | None:
        """The candidate that would be taken next."""
        return self._heaps[tier, None, False].peek()

    def forget(self, trie: SaltTrie) -> None:
        """Drop the heaps of a trie that was removed."""
        for tier in Tier:
            for is_waiting in (False, True):
                self._heaps.pop((tier, trie, is_waiting), None)

    def use_policy(self, policy: Policy) -> None:
        """Sort by another policy from now on; nothing happens if it is the one in force."""
        if policy is self.policy:
            return
        self.policy = policy
        for heap in self._heaps.values():
            fresh = (entry for entry in heap.entries if not entry.candidate.is_stale)
            heap.keep([entry._replace(key=policy.key(entry.candidate.node)) for entry in fresh])
