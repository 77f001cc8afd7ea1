"""Saving: a path's pages, states and restore points go to disk, behind the requests' backs.

What is handed over here is written by the disk's own thread. Nothing waits for it, except an eviction that needs the
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.cache.residency.evictor import memory_of
from bough.cache.residency.memory import Item, own_copy
from bough.cache.residency.trail import Trail
from bough.cache.tree.node import Node, Noted, Point
from bough.cache.tree.state import Page, Place
from bough.cache.tree.trie import Trie

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


def save(cache: PrefixCache, trie: Trie, tokens: bytes, *, whole_pages: bool = False) -> None:
    """Hand over what the path of these tokens, just used, holds and the disk does not; only whole pages while they grow."""
    disk = cache.memory.disk
    if disk is None:
        return
    if not _make_room(cache, trie, trie.match(tokens).path, whole_pages=whole_pages) and whole_pages:
        return
    path = trie.match(tokens).path  # again: making room may have merged nodes
    if not path:
        return
    trail, now = Trail.of(disk, trie, path[-1]), cache.wall()
    for node in path:
        _save_node(cache, trie, node, trail, now, whole_pages=whole_pages)
    if not whole_pages:
        disk.touch([copy for node in path for item in node.items() for copy in item.copies], now)


def save_all(cache: PrefixCache, trie: Trie) -> None:
    """Hand over what a trie holds and the disk does not, wherever it is; none of it counts as used."""
    _save_nodes(cache, trie, list(trie.walk()))


def save_parted(cache: PrefixCache) -> None:
    """Save the tails of edges that were split since: the page across the cut became two, and neither may be on disk yet."""
    parted, cache.parted = cache.parted, []
    for trie, tail in parted:
        _save_nodes(cache, trie, tail.path())


def _save_nodes(cache: PrefixCache, trie: Trie, nodes: Sequence[Node]) -> None:
    disk = cache.memory.disk
    if disk is None:
        return
    for node in nodes:
        last_used = cache.evictor.to_wall(node.last_used)
        if not _unsaved([node]) and not _unnoted(cache, node, last_used):
            continue  # its trail would cost as much as its whole path
        _make_room(cache, trie, [node])
        if _is_attached(trie, node):  # making room may have merged it with another, which comes later or is unsaved for now
            _save_node(cache, trie, node, Trail.of(disk, trie, node), last_used)


def _is_attached(trie: Trie, node: Node) -> bool:
    if node.parent is None:
        return node is trie.root
    return node.parent.children.get(node.first_token) is node


def _make_room(cache: PrefixCache, trie: Trie, nodes: Sequence[Node], *, whole_pages: bool = False) -> bool:
    """Make room on disk for what is to be saved; False if there is nothing."""
    for item in (item for node in nodes for item in node.items() if item.place is not Place.DISK):
        memory_of(trie).tidy(item)
    unsaved = _unsaved(nodes, cache.page_tokens if whole_pages else 0)
    if unsaved:
        cache.evictor.make_disk_room(cache.memory.file_bytes(unsaved), trie)
    return bool(unsaved)


def _save_node(
    cache: PrefixCache, trie: Trie, node: Node, trail: Trail, last_used: float, *, whole_pages: bool = False
) -> None:
    disk = cache.memory.disk
    assert disk is not None
    for item in _unsaved([node], cache.page_tokens if whole_pages else 0):
        if disk.has_room(cache.memory.file_bytes([item])):
            memory_of(trie).save(item, trail.address(item), last_used)
    if not whole_pages:
        _note_points(cache, node, trail, last_used)
    cache.evictor.offer(trie, node)


def lose_disk(trie: Trie) -> None:
    """Let a trie forget its copies; what lies on disk alone is lost."""
    for node in trie.walk():
        for pages in list(node.pages.values()):
            for page in [page for page in pages if page.place is Place.DISK]:
                trie.lose(node, page)
        for point in [p for p in node.points.values() if any(s.place is Place.DISK for s in p.states.values())]:
            trie.drop_point(node, point)
        for item in node.items():
            memory_of(trie).drop_copies(item)
        for point in node.points.values():
            point.noted = None


def _unsaved(nodes: Sequence[Node], page_tokens: int = 0) -> list[Item]:
    """What is in memory and has no file of its own on disk; with a page size, only pages that end at a border."""
    return [
        item
        for node in nodes
        for item in node.items()
        if item.place is not Place.DISK and own_copy(item) is None and (not page_tokens or _is_whole(item, page_tokens))
    ]


def _is_whole(item: Item, page_tokens: int) -> bool:
    return isinstance(item, Page) and item.end % page_tokens == 0


def _unnoted(cache: PrefixCache, node: Node, last_used: float) -> list[Point]:
    """The restore points of a node of which the disk does not know what is true now."""
    return [point for point in node.points.values() if not _is_noted(cache, point, last_used)]


def _is_noted(cache: PrefixCache, point: Point, last_used: float) -> bool:
    noted = point.noted  # its address never changes
    if noted is None or cache.is_aging(last_used - noted.last_used):
        return False
    return (noted.reason, noted.kept, noted.superseded) == (point.reason, point.kept, point.superseded)


def _note_points(cache: PrefixCache, node: Node, trail: Trail, last_used: float) -> None:
    assert cache.memory.disk is not None
    for point in _unnoted(cache, node, last_used):
        point.noted = noted = Noted(trail.address(point), point.reason, point.kept, point.superseded, last_used)
        cache.memory.disk.put_point(
            noted.address,
            reason=noted.reason,
            is_kept=noted.kept,
            is_superseded=noted.superseded,
            last_used=last_used,
        )
