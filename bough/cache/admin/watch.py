"""Watching a tree: what has changed in it since the last look, as plain records.

A look costs what has changed. The first one, and one after a root has got its name, tells everything. While no watch is
open, changes are not noted at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from bough.cache.admin.view import name_root
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest
from bough.cache.steps import Steps
from bough.cache.tree.census import Changes, NodeRecord, TrieRecords


@dataclass
class RootChanges:
    """The new records of one root's nodes, by their keys; None: the node is gone."""

    nodes: dict[int, NodeRecord | None] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeChanges:
    """What has changed, by the names of the roots. After a reset these are all nodes that there are.

    `wall_offset` is what is added to the times of records to get the time of day.
    """

    roots: dict[str, RootChanges]
    is_reset: bool
    wall_offset: float


class TreeWatch:
    """Looks at one tree again and again, on the thread that owns the tree. Any thread may close it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._forest = cache.forest
        self._clock = cache.clock
        self._changes = Changes()
        self._names: dict[TrieRecords, str] | None = None  # as they were at the last look

    def look(self, salts: Collection[str] = ()) -> Steps[TreeChanges]:
        """What has changed since the last look that came to its end.

        A root that came from disk has no name until a request tells its salt, or `salts` have it.
        """
        census = self._forest.census
        if self._changes not in census.watchers:
            census.watchers.append(self._changes)
        yield from census.update()
        names, before = _name_roots(self._forest, salts), self._names
        changed, self._changes.nodes, self._names = self._changes.nodes, {}, names
        if before is None or any(before.get(records, name) != name for records, name in names.items()):
            return TreeChanges(_all_nodes(names), True, -self._clock.offset)
        known, roots = before | names, dict[str, RootChanges]()
        for records, nodes in changed.items():
            if records in known:  # else it was made and removed between two looks
                roots.setdefault(known[records], RootChanges()).nodes |= nodes
        return TreeChanges(roots, False, -self._clock.offset)

    def close(self) -> None:
        """Look no more: what changes is no longer noted for this watch, even if a look is still under way."""
        self._changes.is_over = True


def _all_nodes(names: Mapping[TrieRecords, str]) -> dict[str, RootChanges]:
    return {name: RootChanges({record.key: record for record in records.take()}) for records, name in names.items()}


def _name_roots(forest: SaltForest, salts: Collection[str]) -> dict[TrieRecords, str]:
    names = {trie.records: name_root(salt, trie) for salt, trie in forest.tries.items()}
    for salt in salts:
        trie = forest.find_known(salt)
        if trie is not None:
            names[trie.records] = salt
    return names


@dataclass(frozen=True)
class Place:
    """How far some tokens reach into the tree: the key of the last node, None for the root, and the offset."""

    node: int | None
    offset: int


def locate(cache: PrefixCache, prompts: Sequence[tuple[bytes, str]]) -> list[Place]:
    """Where each of these packed prompts ends in the tree of its salt, changing nothing."""
    found = []
    for packed, salt in prompts:
        trie = cache.forest.find_known(salt)
        match = None if trie is None else trie.match(packed)
        is_root = match is None or match.node.is_root
        found.append(Place(None, 0) if match is None or is_root else Place(match.node.key, match.length))
    return found
