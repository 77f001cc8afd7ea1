"""Saving: pages, states and restore points are handed to the disk, whose own thread writes them.

Nothing waits for a write. What was not used for the time to live expires.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.disk import Disk
from bough.cache.residency.addresses import PathAddresses
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, own_file
from bough.cache.residency.rates import Clock
from bough.cache.steps import Steps
from bough.cache.tree.node import IndexedPoint, Node, Point
from bough.cache.tree.state import Item, Page, Tier

EXPIRE_EVERY_S = 60.0


class Saver:
    """Saves what the disk does not have yet. Without a disk it does nothing."""

    def __init__(
        self, memory: Memory, evictor: Evictor, page_tokens: int, clock: Clock, ttl_s: float | None = None
    ) -> None:
        self._memory = memory
        self._evictor = evictor
        self._page_tokens = page_tokens
        self._clock = clock
        self._ttl_s = ttl_s
        self._split: list[tuple[SaltTrie, Node]] = []

    def save(self, trie: SaltTrie, tokens: bytes, *, whole_pages: bool = False) -> None:
        """Hand over what the path of these tokens holds and the disk lacks; whole pages only, while the path grows."""
        disk = self._memory.disk
        if disk is None:
            return
        page_tokens = self._page_tokens if whole_pages else 0
        if not self._make_room(trie, trie.match(tokens).path, page_tokens) and whole_pages:
            return
        path = trie.match(tokens).path  # again: making room may have merged nodes
        if not path:
            return
        addresses, now = PathAddresses.of(disk, trie, path[-1]), self._clock.wall()
        for node in path:
            self._save_items(disk, trie, node, addresses, now, page_tokens)
            if not whole_pages:
                self._index_points(disk, node, addresses, now)
            self._evictor.offer(trie, node)
        if not whole_pages:
            disk.touch([file for node in path for item in node.items() for file in item.files], now)

    def save_all(self, trie: SaltTrie) -> Steps[int]:
        """Hand over what a trie holds and the disk does not, wherever it is; none of it counts as used.

        Returns how many items there were. What requests change meanwhile may be missed.
        """
        num_items = 0
        for node in trie.walk():
            num_items += len(_unsaved([node]))
            self._save_nodes(trie, [node])
            yield
        return num_items

    def note_split(self, trie: SaltTrie, tail: Node) -> None:
        """An edge was split above `tail`: the page across the cut became two, and neither may be on disk yet."""
        if self._memory.disk is not None:
            self._split.append((trie, tail))

    def save_split(self) -> None:
        """Save the tails of edges that were split since the last time."""
        split, self._split = self._split, []
        for trie, tail in split:
            self._save_nodes(trie, tail.path())

    def _save_nodes(self, trie: SaltTrie, nodes: Sequence[Node]) -> None:
        disk = self._memory.disk
        if disk is None:
            return
        for node in nodes:
            last_used = self._clock.to_wall(node.last_used)
            if not _unsaved([node]) and not self._unindexed(node, last_used):
                continue  # its addresses would cost as much as its whole path
            self._make_room(trie, [node])
            if _is_attached(trie, node):  # making room may have merged it with another, which is saved later
                addresses = PathAddresses.of(disk, trie, node)
                self._save_items(disk, trie, node, addresses, last_used)
                self._index_points(disk, node, addresses, last_used)
                self._evictor.offer(trie, node)

    def _make_room(self, trie: SaltTrie, nodes: Sequence[Node], page_tokens: int = 0) -> bool:
        """Make room on disk for what is to be saved; False if there is nothing."""
        for item in (item for node in nodes for item in node.items() if item.tier is not Tier.DISK):
            trie.memory.drop_useless(item)
        unsaved = _unsaved(nodes, page_tokens)
        if unsaved:
            self._evictor.make_disk_room(self._memory.file_bytes(unsaved), trie)
        return bool(unsaved)

    def _save_items(
        self, disk: Disk, trie: SaltTrie, node: Node, addresses: PathAddresses, last_used: float, page_tokens: int = 0
    ) -> None:
        for item in _unsaved([node], page_tokens):
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
    """Removes what was not used for the time to live, about once a minute. Without one it does nothing."""

    def __init__(self, forest: SaltForest, evictor: Evictor, clock: Clock, ttl_s: float | None) -> None:
        self._forest = forest
        self._evictor = evictor
        self._clock = clock
        self._ttl_s = ttl_s
        self._next_at = clock.now()

    def expire(self) -> None:
        """Remove what is too old, if a minute has passed. Costs a walk over the whole tree then."""
        if self._ttl_s is None or (now := self._clock.now()) < self._next_at:
            return
        self._next_at = now + min(EXPIRE_EVERY_S, self._ttl_s)
        for trie in list(self._forest.tries.values()):
            for node in reversed(list(trie.walk())):
                if node.parent and node.is_leaf and not node.pins and node.last_used < now - self._ttl_s:
                    self._evictor.remove(trie, node)


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


def _is_attached(trie: SaltTrie, node: Node) -> bool:
    if node.parent is None:
        return node is trie.root
    return node.parent.children.get(node.first_token) is node


def _unsaved(nodes: Sequence[Node], page_tokens: int = 0) -> list[Item]:
    """What is in memory and has no file of its own on disk; with a page size, only pages that end at a border."""
    return [
        item
        for node in nodes
        for item in node.items()
        if item.tier is not Tier.DISK and own_file(item) is None and (not page_tokens or _is_whole(item, page_tokens))
    ]


def _is_whole(item: Item, page_tokens: int) -> bool:
    return isinstance(item, Page) and item.end % page_tokens == 0
