"""The census of a forest: what it holds, counted as it changes, and a plain record of each node for views.

Each trie reports its changes to its memory, and so to a `TrieCensus`. So figures cost nothing to read, and a view of the
whole tree costs what has changed since the last one. Records never change: any thread may read them. While the tree is
watched, the census also keeps the records that are new, and the nodes that are gone, since each watcher's last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from bough.cache.tree.node import Node
from bough.cache.tree.state import Tier


@dataclass(slots=True)
class TreeCounts:
    """Nodes without roots, the tokens of their edges, their pages and restore points, and how many of these are kept."""

    nodes: int = 0
    tokens: int = 0
    pages: int = 0
    points: int = 0
    kept: int = 0

    @staticmethod
    def of(node: Node) -> TreeCounts:
        kept = sum(point.kept for point in node.points.values())
        return TreeCounts(1, node.end - node.start, sum(map(len, node.pages.values())), len(node.points), kept)

    @staticmethod
    def sum(parts: Iterable[TreeCounts]) -> TreeCounts:
        total = TreeCounts()
        for part in parts:
            total.replace(_NOTHING, part)
        return total

    def replace(self, old: TreeCounts, new: TreeCounts) -> None:
        """Count `new` in place of `old`."""
        self.nodes += new.nodes - old.nodes
        self.tokens += new.tokens - old.tokens
        self.pages += new.pages - old.pages
        self.points += new.points - old.points
        self.kept += new.kept - old.kept


_NOTHING = TreeCounts()


class NodeRecord(NamedTuple):
    """A node as it was when it last changed. `parent` is a key, or None below the root. A key is never used again.

    When an edge is split, the node further from the root keeps its key; so it does when two nodes are merged. `nbytes` is
    memory; `tiers` counts pages and states by tier; `number` gives the order of siblings.
    """

    key: int
    parent: int | None
    number: int
    start: int
    end: int
    edge: bytes
    nbytes: int
    num_pages: int
    tiers: tuple[int, ...]
    points: tuple[int, ...]
    kept: tuple[int, ...]
    is_in_use: bool
    hits: int
    last_used: float

    @staticmethod
    def of(node: Node) -> NodeRecord:
        """The record of a node as it is now."""
        tiers, parent = [0] * len(Tier), node.parent
        for item in node.items():
            tiers[item.tier] += 1
        return NodeRecord(
            node.key,
            parent.key if parent is not None and parent.parent is not None else None,
            node.number,
            node.start,
            node.end,
            node.edge,
            node.nbytes,
            sum(map(len, node.pages.values())),
            tuple(tiers),
            tuple(sorted(node.points)),
            tuple(sorted(at for at, point in node.points.items() if point.kept)),
            bool(node.holds),
            node.hits,
            node.last_used,
        )


class TrieCensus:
    """The counts of one trie, and records of its nodes; those of nodes in `Census.changed` are missing or out of date."""

    def __init__(self, forest: Census) -> None:
        self.counts = TreeCounts()
        self.records: dict[Node, NodeRecord] = {}
        self._forest = forest
        self._sizes: dict[Node, TreeCounts] = {}  # as they were counted last
        self._taken: tuple[NodeRecord, ...] | None = ()  # all records, until one changes

    @property
    def nodes(self) -> KeysView[Node]:
        """The nodes of the trie, without the root."""
        return self._sizes.keys()

    def note(self, node: Node) -> None:
        """A node is new, or what is counted or recorded of it has changed. O(its groups and restore points)."""
        if node.parent is not None:
            node.key = node.key or next(self._forest.keys)
            node.number = node.number or node.key
            self._forest.changed[node] = self
            self._count(node, TreeCounts.of(node))

    def forget(self, node: Node) -> None:
        self._count(node, _NOTHING)
        del self._sizes[node]
        self._forest.changed.pop(node, None)
        if self.records.pop(node, None) is not None:
            self._taken = None
            self._forest.notify(self, node.key, None)

    def _count(self, node: Node, new: TreeCounts) -> None:
        old = self._sizes.get(node, _NOTHING)
        if new != old:
            self.counts.replace(old, new)
            self._forest.counts.replace(old, new)
            self._sizes[node] = new

    def record(self, node: Node) -> None:
        """Make the record of a node, or make it anew."""
        self.records[node] = record = NodeRecord.of(node)
        self._taken = None
        self._forest.notify(self, node.key, record)

    def take(self) -> tuple[NodeRecord, ...]:
        """All records; costs nothing if none has changed since the last call."""
        if self._taken is None:
            self._taken = tuple(self.records.values())
        return self._taken

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that the counts are what counting gives, and that a node without a valid record is noted as changed."""
        sizes = {node: TreeCounts.of(node) for node in nodes}
        assert self._sizes == sizes and self.counts == TreeCounts.sum(sizes.values())
        assert sizes.keys() >= self.records.keys()
        assert all(node in self._forest.changed or self.records[node] == NodeRecord.of(node) for node in sizes)


class UnseenChanges:
    """The changes that a watcher has not looked at yet.

    `nodes` has the newest record of each changed node, by trie and key; None: the node is gone. Any thread may set
    `is_over`: then nothing more is noted here, and the census forgets the watcher with the next change.
    """

    def __init__(self) -> None:
        self.nodes: dict[TrieCensus, dict[int, NodeRecord | None]] = {}
        self.is_over = False


class Census:
    """The counts of a forest, and which nodes have changed since they were recorded."""

    def __init__(self) -> None:
        self.counts = TreeCounts()
        self.changed: dict[Node, TrieCensus] = {}  # never a root or a removed node
        self.watchers: list[UnseenChanges] = []
        self.keys = count(1)

    def update(self) -> Iterator[None]:
        """Record the nodes that have changed, one a step. Those that change meanwhile are recorded too."""
        while self.changed:
            node, trie = self.changed.popitem()
            trie.record(node)
            yield

    def notify(self, trie: TrieCensus, key: int, record: NodeRecord | None) -> None:
        """Give a new record, or None for a removed node, to the watchers."""
        for watcher in tuple(self.watchers):
            if watcher.is_over:
                self.watchers.remove(watcher)
            else:
                watcher.nodes.setdefault(trie, {})[key] = record

    def check(self, tries: Sequence[TrieCensus]) -> None:
        """Assert that the counts are those of all tries, and that only nodes of these are noted as changed."""
        assert self.counts == TreeCounts.sum(trie.counts for trie in tries)
        assert all(node in trie.nodes for node, trie in self.changed.items()) and set(tries).issuperset(
            self.changed.values()
        )
