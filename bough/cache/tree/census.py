"""The census of a tree: what it holds, counted as it changes, and a plain record of each node for who looks at it.

The tries count and note their own changes. So figures cost nothing to read, and a view of the whole tree costs what has
changed since the last one. Records never change: any thread may read them. While somebody watches the tree, the census also
keeps which records are new and which nodes are gone since the last look.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def change(self, nodes: int = 0, tokens: int = 0, pages: int = 0, points: int = 0, kept: int = 0) -> None:
        self.nodes += nodes
        self.tokens += tokens
        self.pages += pages
        self.points += points
        self.kept += kept

    @staticmethod
    def of(nodes: Iterator[Node]) -> TreeCounts:
        """Count these nodes one by one."""
        total = TreeCounts()
        for node in nodes:
            if not node.is_root:
                pages = sum(len(pages) for pages in node.pages.values())
                kept = sum(point.kept for point in node.points.values())
                total.change(1, node.end - node.start, pages, len(node.points), kept)
        return total


class NodeRecord(NamedTuple):
    """A node as it was when it last changed. `parent` is a key, or None below the root. A key is never given again.

    When an edge is split, the node further from the root keeps its key; so it does when two nodes are merged.

    `nbytes` is memory; `tiers` counts pages and states by where their content lies; `number` gives the order of siblings.
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
    is_pinned: bool
    hits: int
    last_used: float

    @staticmethod
    def of(node: Node) -> NodeRecord:
        """The record of a node as it is now."""
        tiers, nbytes, parent = [0] * len(Tier), 0, node.parent
        for item in node.items():
            tiers[item.tier] += 1
            nbytes += item.nbytes
        return NodeRecord(
            node.key,
            parent.key if parent is not None and parent.parent is not None else None,
            node.number,
            node.start,
            node.end,
            node.edge,
            nbytes,
            sum(map(len, node.pages.values())),
            tuple(tiers),
            tuple(sorted(node.points)),
            tuple(sorted(at for at, point in node.points.items() if point.kept)),
            bool(node.pins),
            node.hits,
            node.last_used,
        )


class TrieRecords:
    """The records of one trie's nodes. Those of nodes that the census notes as changed are out of date or missing."""

    def __init__(self) -> None:
        self.by_node: dict[Node, NodeRecord] = {}
        self._taken: tuple[NodeRecord, ...] | None = ()  # all of them, until one changes

    def record(self, node: Node) -> NodeRecord:
        """Make the record of a node, or make it anew."""
        made = self.by_node[node] = NodeRecord.of(node)
        self._taken = None
        return made

    def forget(self, node: Node) -> bool:
        """A node was removed; tells whether it had a record."""
        if self.by_node.pop(node, None) is None:
            return False
        self._taken = None
        return True

    def take(self) -> tuple[NodeRecord, ...]:
        """All records; costs nothing if none has changed since the last time."""
        if self._taken is None:
            self._taken = tuple(self.by_node.values())
        return self._taken


class Changes:
    """What a watcher has not looked at yet.

    `nodes` has the newest record of each changed node, by the records of its trie and by its key; None: the node is gone.
    Any thread may set `is_over`: then nothing more is noted here, and the census forgets the watcher with the next change.
    """

    def __init__(self) -> None:
        self.nodes: dict[TrieRecords, dict[int, NodeRecord | None]] = {}
        self.is_over = False

    def note(self, records: TrieRecords, key: int, record: NodeRecord | None) -> None:
        self.nodes.setdefault(records, {})[key] = record


class Census:
    """The counts of a forest, and which nodes have changed since they were recorded."""

    def __init__(self) -> None:
        self.counts = TreeCounts()
        self.changed: dict[Node, TrieRecords] = {}  # each with the records of its trie; never a root or a removed node
        self.watchers: list[Changes] = []
        self._keys = count(1)

    def next_key(self) -> int:
        """A key for a new node."""
        return next(self._keys)

    def update(self) -> Iterator[None]:
        """Record the nodes that have changed, one a step. Those that change meanwhile are recorded too."""
        while self.changed:
            node, records = self.changed.popitem()
            record = records.record(node)
            self._tell_watchers(records, record.key, record)
            yield

    def forget(self, node: Node, records: TrieRecords) -> None:
        """A node of this trie was removed."""
        self.changed.pop(node, None)
        if records.forget(node):
            self._tell_watchers(records, node.key, None)

    def _tell_watchers(self, records: TrieRecords, key: int, record: NodeRecord | None) -> None:
        for watcher in tuple(self.watchers):
            if watcher.is_over:
                self.watchers.remove(watcher)
            else:
                watcher.note(records, key, record)
