"""Saving: pages, states and restore points are handed to the disk, whose own thread writes them, and expire there.

Nothing waits for a write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.disk import Disk
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import LiveSequence
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, covering_file, own_file
from bough.cache.residency.node_paths import PathAddresses
from bough.cache.residency.rates import Clock
from bough.cache.steps import Steps
from bough.cache.tree.address import PageBorder, PointRecord
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import Item, Tier

EXPIRE_EVERY_S = 60.0

EXPIRE_NODES, EXPIRE_REMOVALS = 1024, 32
"""At most this many nodes are looked at in one go, and at most this many removed, each with its parents."""


@dataclass(frozen=True)
class SavePass:
    """One pass over a trie: how many items had no file of their own, and how many of them a disk that backs off refused."""

    num_items: int
    num_refused: int


class Saver:
    """Saves what the disk does not have yet. Without a disk, or with one that is only read, it does nothing."""

    def __init__(self, memory: Memory, evictor: Evictor, clock: Clock, ttl_s: float | None) -> None:
        self._memory = memory
        self._evictor = evictor
        self._clock = clock
        self._ttl_s = ttl_s
        self._split: list[tuple[SaltTrie, Node]] = []

    def save_filled(self, sequence: LiveSequence) -> None:
        """Hand over the rows of full attention that have filled pages since the last time. Costs what is new.

        Rows that cannot be handed over now, and those that lose their file again, are saved when the session ends; so is
        everything that belongs to restore points, which are not indexed before.
        """
        disk = self._memory.writable_disk
        if disk is None or not self._memory.full:
            return
        border = sequence.saved_to = sequence.saved_to or self._last_border(disk, sequence)
        end = sequence.hold.offset // self._memory.page_tokens * self._memory.page_tokens
        if border.offset >= end:
            return
        filled = self._pages_between(sequence, border.offset, end)  # protected by the hold
        self._make_room(sequence.trie, [page for pages in filled.values() for page in pages])
        addresses = PathAddresses.following(disk, sequence.trie, border, sequence.packed(border.offset, end))
        now = self._clock.wall()
        for node, pages in filled.items():
            self._save_items(disk, sequence.trie, pages, addresses, now)
            self._evictor.offer(sequence.trie, node)
        sequence.saved_to = addresses.last_border

    def _last_border(self, disk: Disk, sequence: LiveSequence) -> PageBorder:
        """The border before the last page on the path that has a file, whose address has the digest; else the root.

        Costs a look at the pages after that one.
        """
        size = self._memory.page_tokens
        for node in sequence.hold.node.upwards(0):
            for page in reversed(node.pages_between(self._memory.full[0], node.start, sequence.hold.offset)):
                if page.files:
                    return PageBorder(page.start // size * size, next(iter(page.files)).address.before)
        return PageBorder(0, disk.digests(sequence.trie.root_id, b"")[0])

    def _pages_between(self, sequence: LiveSequence, start: int, end: int) -> dict[Node, list[Item]]:
        """The pages of full attention with rows of [start, end), by the nodes of the path, the shallowest first."""
        return {
            node: [page for group in self._memory.full for page in node.pages_between(group, start, end)]
            for node in sequence.hold.node.path()
            if node.end > start
        }

    def save(self, trie: SaltTrie, path: Sequence[Node]) -> None:
        """Hand over what a path holds and the disk lacks. Costs as much as that path has tokens."""
        disk = self._memory.writable_disk
        if disk is None:
            return
        self._make_room(trie, [item for node in path for item in node.items()])
        path = trie.held_part(path)
        if not path:
            return
        addresses, now = PathAddresses.of(disk, trie, path[-1]), self._clock.wall()
        for node in path:
            self._save_node(disk, trie, node, addresses, now)
        for node in path:
            _note_hits(node)
        disk.touch([file for node in path for item in node.items() for file in item.files], now)

    def save_all(self, trie: SaltTrie) -> Steps[SavePass]:
        """Hand over what a trie holds and the disk does not; none of it counts as used.

        Changes that requests make meanwhile may be missed.
        """
        disk = self._memory.disk
        if disk is None:
            return SavePass(0, 0)
        num_items = num_refused = 0
        for node in trie.walk():
            num_items += len(_unsaved(node.items()))
            could_write = disk.can_write
            self._save_nodes(trie, [node])
            if not (could_write and disk.can_write):
                num_refused += len(_unsaved(node.items()))
            yield
        return SavePass(num_items, num_refused)

    def count_without_room(self, trie: SaltTrie) -> Steps[int]:
        """How many items of a trie have no file, if the disk has no room for all of them."""
        disk = self._memory.disk
        num_items = nbytes = 0
        for node in trie.walk():
            unsaved = [item for item in _unsaved(node.items()) if covering_file(item) is None]
            num_items += len(unsaved)
            nbytes += self._memory.file_bytes(unsaved) if unsaved else 0
            yield
        return 0 if disk is None or disk.has_room(nbytes) else num_items

    def split_edge(self, trie: SaltTrie, node: Node, at: int) -> Node:
        """Split a node, offer both parts to eviction and return the new upper one. The node stays the lower part.

        The page across the cut becomes two, which may not be on disk yet: `save_split` saves them. May raise EngineError.
        """
        head = trie.split(node, at)
        if self._memory.writable_disk is not None:
            self._split.append((trie, node))
        self._evictor.offer(trie, node)
        self._evictor.offer(trie, head)
        return head

    def save_split(self) -> None:
        """Save the halves of edges that were split since the last time."""
        split, self._split = self._split, []
        for trie, node in split:
            self._save_nodes(trie, node.path())

    def _save_nodes(self, trie: SaltTrie, nodes: Sequence[Node]) -> None:
        disk = self._memory.writable_disk
        if disk is None:
            return
        for node in nodes:
            last_used = self._clock.to_wall(node.last_used)
            if not _unsaved(node.items()) and not self._unindexed(node, last_used):
                continue  # its addresses would cost as much as its whole path
            self._make_room(trie, list(node.items()))
            if trie.has(node):  # making room may have dropped it, and a session that closed may have merged it
                self._save_node(disk, trie, node, PathAddresses.of(disk, trie, node), last_used)

    def _save_node(self, disk: Disk, trie: SaltTrie, node: Node, addresses: PathAddresses, last_used: float) -> None:
        """Save the items of a node that the disk has room for, and index its restore points."""
        self._save_items(disk, trie, node.items(), addresses, last_used)
        _note_hits(node)
        self._index_points(disk, node, addresses, last_used)
        self._evictor.offer(trie, node)

    def _make_room(self, trie: SaltTrie, items: Sequence[Item]) -> None:
        """Make room on disk for those of these items that are to be saved, as far as possible."""
        for item in items:
            if item.tier is not Tier.DISK:
                trie.memory.drop_useless(item)
        if unsaved := _unsaved(items):
            self._evictor.make_disk_room(self._memory.file_bytes(unsaved), trie)

    def _save_items(
        self, disk: Disk, trie: SaltTrie, items: Iterable[Item], addresses: PathAddresses, last_used: float
    ) -> None:
        for item in _unsaved(items):
            if disk.has_room(self._memory.file_bytes([item])):
                trie.memory.save(item, addresses.address(item), last_used)

    def _index_points(self, disk: Disk, node: Node, addresses: PathAddresses, last_used: float) -> None:
        for point in self._unindexed(node, last_used):
            address = addresses.address(point)
            point.indexed = PointRecord(address, point.reason, point.kept, point.superseded, last_used)
            disk.put_point(point.indexed)

    def _unindexed(self, node: Node, last_used: float) -> list[Point]:
        """The restore points of a node that are not on disk as they are now."""
        return [point for point in node.points.values() if not self._is_indexed(point, last_used)]

    def _is_indexed(self, point: Point, last_used: float) -> bool:
        indexed = point.indexed  # its address never changes
        if indexed is None:
            return False
        if self._ttl_s is not None and last_used - indexed.last_used > self._ttl_s / 4:
            return False  # with a time of use this old, the restore point might expire too early
        return (indexed.reason, indexed.is_kept, indexed.is_superseded) == (point.reason, point.kept, point.superseded)


class Expiry:
    """Removes nodes that were not used for the time to live. Looks at the whole tree about once a minute, in parts.

    Without a time to live it does nothing.
    """

    def __init__(self, forest: SaltForest, evictor: Evictor, clock: Clock, ttl_s: float | None) -> None:
        self._forest = forest
        self._evictor = evictor
        self._clock = clock
        self._ttl_s = ttl_s
        self._next_at = clock.now()
        self._sweep: Iterator[tuple[SaltTrie, Node]] | None = None  # the nodes that are still to be looked at

    def expire(self) -> bool:
        """Look at the next nodes, if a sweep is due, and remove those that are too old; returns whether there are more."""
        if self._ttl_s is None:
            return False
        now = self._clock.now()
        if self._sweep is None and now >= self._next_at:
            self._next_at = now + min(EXPIRE_EVERY_S, self._ttl_s)
            self._sweep = self._nodes()
        num_removed = 0
        for _ in range(EXPIRE_NODES):
            found = next(self._sweep, None) if self._sweep else None
            if found is None:
                self._sweep = None
                return False
            num_removed += self._remove_old(*found, now - self._ttl_s)
            if num_removed >= EXPIRE_REMOVALS:
                break
        return True

    def _nodes(self) -> Iterator[tuple[SaltTrie, Node]]:
        """Every node. The tree may change meanwhile: new nodes may be missing, and nodes that come may be gone."""
        for trie in list(self._forest.tries.values()):
            for node in trie.walk():
                yield trie, node

    def _remove_old(self, trie: SaltTrie, node: Node, before: float) -> int:
        """Remove a leaf that was last used before then, and parents that become such leaves; returns how many."""
        num_removed = 0
        for each in reversed(node.path()) if node.is_leaf and node.last_used < before else ():
            if not trie.has(each):
                continue  # it was merged, or has gone with what was below it
            if each.children or each.holds or each.last_used >= before:
                break
            self._evictor.remove(trie, each)
            num_removed += 1
        return num_removed


def forget_disk(trie: SaltTrie) -> None:
    """Let a trie forget its files; content that is on disk alone is lost."""
    for node in trie.walk():
        for pages in list(node.pages.values()):
            for page in [page for page in pages if page.tier is Tier.DISK]:
                trie.drop_page(node, page)
        for point in [p for p in node.points.values() if any(s.tier is Tier.DISK for s in p.states.values())]:
            trie.drop_point(node, point)
        for item in node.items():
            trie.memory.drop_files(item)
        for point in node.points.values():
            point.indexed = None


def _note_hits(node: Node) -> None:
    """Note how often a node was used with its files. Of several nodes with content in a file, the deepest comes last."""
    for item in node.items():
        for file in item.files:
            file.hits = node.hits


def _unsaved(items: Iterable[Item]) -> list[Item]:
    """Items that are in memory and have no file of their own on disk."""
    return [item for item in items if item.tier is not Tier.DISK and own_file(item) is None]
