"""Saving: pages, states and restore points are handed to the disk, whose own thread writes them.

Nothing waits for a write. What was not used for the time to live expires.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.disk import Disk
from bough.cache.residency.addresses import PathAddresses
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import LiveSequence
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, covering_file, own_file
from bough.cache.residency.rates import Clock
from bough.cache.steps import Steps
from bough.cache.tree.address import PageBorder
from bough.cache.tree.node import IndexedPoint, Node, Point
from bough.cache.tree.state import Item, Kind, Tier

EXPIRE_EVERY_S = 60.0

EXPIRE_NODES = 1024
"""So many nodes are looked at in one go for what has expired."""

EXPIRE_REMOVALS = 32
"""And so many are removed in one go, each with its parents."""


@dataclass(frozen=True)
class SavePass:
    """One pass over a trie: how many items had no file of their own, and how many of them a disk that backs off refused."""

    num_items: int
    num_refused: int


class Saver:
    """Saves what the disk does not have yet. Without a disk, or with one that is only read, it does nothing."""

    def __init__(
        self, memory: Memory, evictor: Evictor, page_tokens: int, clock: Clock, ttl_s: float | None = None
    ) -> None:
        self._memory = memory
        self._evictor = evictor
        self._page_tokens = page_tokens
        self._clock = clock
        self._ttl_s = ttl_s
        self._full_groups = [group for group in memory.groups if group.kind is Kind.FULL]
        self._split: list[tuple[SaltTrie, Node]] = []

    def save_filled(self, sequence: LiveSequence) -> None:
        """Hand over the rows of full attention that have filled pages since the last time. Costs what is new.

        What cannot be handed over now, and what loses its file again later, is saved when the session ends; so is all that
        belongs to restore points, which are not indexed before.
        """
        disk = self._memory.writable_disk
        if disk is None or not self._full_groups:
            return
        border = sequence.saved_to = sequence.saved_to or self._last_border(disk, sequence)
        end = sequence.pin.offset // self._page_tokens * self._page_tokens
        if border.offset >= end:
            return
        filled = self._pages_between(sequence, border.offset, end)
        self._make_room(sequence.trie, [page for pages in filled.values() for page in pages])
        addresses = PathAddresses.following(disk, sequence.trie, border, sequence.packed(border.offset, end))
        now = self._clock.wall()
        for node, pages in self._pages_between(sequence, border.offset, end).items():  # again: nodes may have merged
            self._save_items(disk, sequence.trie, pages, addresses, now)
            self._evictor.offer(sequence.trie, node)
        sequence.saved_to = addresses.last_border

    def _last_border(self, disk: Disk, sequence: LiveSequence) -> PageBorder:
        """The border before the last page on the path that has a file, whose address tells the digest; else the root.

        Costs a look at the pages after that one.
        """
        for node in reversed(sequence.pin.node.path()):
            for page in reversed(node.pages_between(self._full_groups[0], node.start, sequence.pin.offset)):
                if page.files:
                    file = next(iter(page.files))
                    return PageBorder(page.start // self._page_tokens * self._page_tokens, file.address.before)
        return PageBorder(0, disk.digests(sequence.trie.root_id, b"")[0])

    def _pages_between(self, sequence: LiveSequence, start: int, end: int) -> dict[Node, list[Item]]:
        """The pages of full attention with rows of [start, end), by the nodes of the path, the shallowest first."""
        return {
            node: [page for group in self._full_groups for page in node.pages_between(group, start, end)]
            for node in sequence.pin.node.path()
            if node.end > start
        }

    def save(self, trie: SaltTrie, tokens: bytes) -> None:
        """Hand over what the path of these tokens holds and the disk lacks. Costs as much as that path has tokens."""
        disk = self._memory.writable_disk
        if disk is None:
            return
        self._make_room(trie, [item for node in trie.match(tokens).path for item in node.items()])
        path = trie.match(tokens).path  # again: making room may have merged nodes
        if not path:
            return
        addresses, now = PathAddresses.of(disk, trie, path[-1]), self._clock.wall()
        for node in path:
            self._save_items(disk, trie, node.items(), addresses, now)
            self._index_points(disk, node, addresses, now)
            self._evictor.offer(trie, node)
        disk.touch([file for node in path for item in node.items() for file in item.files], now)

    def save_all(self, trie: SaltTrie) -> Steps[SavePass]:
        """Hand over what a trie holds and the disk does not, wherever it is; none of it counts as used.

        What requests change meanwhile may be missed.
        """
        disk = self._memory.disk
        num_items = num_refused = 0
        for node in trie.walk():
            num_items += len(_unsaved(node.items()))
            could_write = disk is not None and disk.can_write
            self._save_nodes(trie, [node])
            if disk is not None and not (could_write and disk.can_write):
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

    def note_split(self, trie: SaltTrie, tail: Node) -> None:
        """An edge was split above `tail`: the page across the cut became two, and neither may be on disk yet."""
        if self._memory.writable_disk is not None:
            self._split.append((trie, tail))

    def save_split(self) -> None:
        """Save the tails of edges that were split since the last time."""
        split, self._split = self._split, []
        for trie, tail in split:
            self._save_nodes(trie, tail.path())

    def _save_nodes(self, trie: SaltTrie, nodes: Sequence[Node]) -> None:
        disk = self._memory.writable_disk
        if disk is None:
            return
        for node in nodes:
            last_used = self._clock.to_wall(node.last_used)
            if not _unsaved(node.items()) and not self._unindexed(node, last_used):
                continue  # its addresses would cost as much as its whole path
            self._make_room(trie, list(node.items()))
            if trie.holds(node):  # making room may have merged it with another, which is saved later
                addresses = PathAddresses.of(disk, trie, node)
                self._save_items(disk, trie, node.items(), addresses, last_used)
                self._index_points(disk, node, addresses, last_used)
                self._evictor.offer(trie, node)

    def _make_room(self, trie: SaltTrie, items: Sequence[Item]) -> None:
        """Make room on disk for what of these items is to be saved, as far as it can be made."""
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
            point.indexed = indexed = IndexedPoint(
                addresses.address(point), point.reason, point.kept, point.superseded, last_used
            )
            disk.put_point(
                indexed.address,
                reason=indexed.reason,
                is_kept=indexed.kept,
                is_superseded=indexed.superseded,
                last_used=last_used,
            )

    def _unindexed(self, node: Node, last_used: float) -> list[Point]:
        """The restore points of a node of which the disk does not know what is true now."""
        return [point for point in node.points.values() if not self._is_indexed(point, last_used)]

    def _is_indexed(self, point: Point, last_used: float) -> bool:
        indexed = point.indexed  # its address never changes
        if indexed is None or self._is_aging(last_used - indexed.last_used):
            return False
        return (indexed.reason, indexed.kept, indexed.superseded) == (point.reason, point.kept, point.superseded)

    def _is_aging(self, seconds: float) -> bool:
        """Whether a note of use that is so old may let its restore point expire too early."""
        return self._ttl_s is not None and seconds > self._ttl_s / 4


class Expiry:
    """Removes what was not used for the time to live: it looks at the whole tree about once a minute, a part at a time.

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
        """Look at the next few nodes, if a sweep is due, and remove what is too old; returns whether there are more."""
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
        """Every node. The tree may change on the way: of what is new some may be missing, and some may be gone."""
        for trie in list(self._forest.tries.values()):
            for node in trie.walk():
                yield trie, node

    def _remove_old(self, trie: SaltTrie, node: Node, before: float) -> int:
        """Remove a leaf that was last used before then, and its parents if they are such leaves then; returns how many."""
        num_removed = 0
        for each in reversed(node.path()) if node.is_leaf and node.last_used < before else ():
            if not trie.holds(each):
                continue  # it was merged, or has gone with what was below it
            if each.children or each.pins or each.last_used >= before:
                break
            self._evictor.remove(trie, each)
            num_removed += 1
        return num_removed


def forget_disk(trie: SaltTrie) -> None:
    """Let a trie forget its files; what lies on disk alone is lost."""
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


def _unsaved(items: Iterable[Item]) -> list[Item]:
    """What is in memory and has no file of its own on disk."""
    return [item for item in items if item.tier is not Tier.DISK and own_file(item) is None]
