"""Watching a tree: the changes since the last look, as plain records.

A look costs what has changed. The first one, and one after a root has got its name, returns everything. While no watch is
open, changes are not noted at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bough.cache.admin.view import name_root
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest, SaltTrie
from bough.cache.residency.census import NodeRecord, TrieCensus, UnseenChanges
from bough.cache.steps import Steps


@dataclass
class RootChanges:
    """The changes of one root: all records, after a reset, and those that have changed, by their keys.

    Any thread may read `nodes`. They are put together there, because that takes milliseconds for a whole tree.
    """

    records: Sequence[NodeRecord] = ()
    changed: dict[int, NodeRecord | None] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> dict[int, NodeRecord | None]:
        """The new records by their keys; None: the node is gone."""
        return {record.key: record for record in self.records} | self.changed


@dataclass(frozen=True)
class TreeChanges:
    """The changes by the names of the roots. After a reset these are all nodes.

    `wall_offset`, added to a time of a record, gives the time of day.
    """

    roots: dict[str, RootChanges]
    is_reset: bool
    wall_offset: float


class TreeWatch:
    """Repeated looks at one tree, on the thread that owns the tree. Any thread may close it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._forest, self._census = cache.forest, cache.memory.census
        self._clock = cache.clock
        self._changes = UnseenChanges()
        self._names: dict[TrieCensus, str] | None = None  # as they were at the last look

    def look(self, salts: Collection[str] = ()) -> Steps[TreeChanges]:
        """The changes since the last look that was completed.

        A root that came from disk has no name until a request names its salt, or `salts` have it.
        """
        census = self._census
        if self._changes not in census.watchers:
            census.watchers.append(self._changes)
        yield from census.update()
        names, before = _name_roots(self._forest, salts), self._names
        changed, self._changes.nodes, self._names = self._changes.nodes, {}, names
        if before is None or any(before.get(records, name) != name for records, name in names.items()):
            everything = {name: RootChanges(records.take()) for records, name in names.items()}
            return TreeChanges(everything, True, -self._clock.offset)
        known, roots = before | names, dict[str, RootChanges]()
        for records, nodes in changed.items():
            if records in known:  # else it was made and removed between two looks
                roots.setdefault(known[records], RootChanges()).changed |= nodes
        return TreeChanges(roots, False, -self._clock.offset)

    def close(self) -> None:
        """End the watch: changes are no longer noted for it, even if a look is still under way."""
        self._changes.is_over = True


def _name_roots(forest: SaltForest, salts: Collection[str]) -> dict[TrieCensus, str]:
    names = {trie.memory.census: name_root(salt, trie) for salt, trie in forest.tries.items()}
    for salt in salts:
        trie = forest.find_known(salt)
        if trie is not None:
            names[trie.memory.census] = salt
    return names


@dataclass(frozen=True)
class TreePosition:
    """How far tokens reach into the tree: the key of the last node, None for the root, and the offset."""

    node: int | None
    offset: int


def locate(cache: PrefixCache, prompts: Sequence[tuple[bytes, str]]) -> list[TreePosition]:
    """Where each of these packed prompts ends in the tree of its salt. Changes nothing."""
    return [_locate(cache.forest.find_known(salt), packed) for packed, salt in prompts]


def _locate(trie: SaltTrie | None, packed: bytes) -> TreePosition:
    match = None if trie is None else trie.match(packed)
    if match is None or match.node.is_root:
        return TreePosition(None, 0)
    return TreePosition(match.node.key, match.length)
