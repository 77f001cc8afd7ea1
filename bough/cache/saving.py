"""Saving: a path's pages, states and restore points go to disk, behind the requests' backs.

What is handed over here is written by the disk's own thread. Nothing waits for it, except an eviction that needs the
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.cache.evictor import memory_of
from bough.cache.memory import Item, covering_copy, span
from bough.cache.node import Node, Noted
from bough.cache.state import Page, Place
from bough.cache.trail import Trail
from bough.cache.trie import Trie

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


def save(cache: PrefixCache, trie: Trie, tokens: bytes, *, whole_pages: bool = False, is_use: bool = True) -> None:
    """Hand over what the path of these tokens holds and the disk does not; only whole pages while they still grow.

    If that follows a use, the disk learns when the path was last used.
    """
    disk = cache.memory.disk
    if disk is None:
        return
    path = trie.match(tokens).path
    for item in (item for node in path for item in node.items() if item.place is not Place.DISK):
        memory_of(trie).tidy(item)
    unsaved = _unsaved(cache, path, whole_pages=whole_pages)
    if unsaved:
        cache.evictor.make_disk_room(cache.memory.file_bytes(unsaved), trie)
        path = trie.match(tokens).path  # again: making room may have merged nodes
    if not path:
        return
    trail, now = Trail.of(disk, trie, path[-1]), cache.wall()
    for item in _unsaved(cache, path, whole_pages=whole_pages):
        if disk.has_room(cache.memory.file_bytes([item])):
            memory_of(trie).save(item, trail.address(item), now)
    if not whole_pages:
        _note_points(cache, path, trail, now)
        if is_use:
            disk.touch([copy for node in path for item in node.items() for copy in item.copies], now)
    for node in path:
        cache.evictor.offer(trie, node)


def save_parted(cache: PrefixCache) -> None:
    """Save the tails of edges that were split since: the page across the cut became two, and neither may be on disk yet."""
    parted, cache.parted = cache.parted, []
    for trie, tail in parted:
        if tail.parent is not None:
            save(cache, trie, b"".join(node.edge for node in tail.path()), is_use=False)


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


def _unsaved(cache: PrefixCache, path: Sequence[Node], *, whole_pages: bool) -> list[Item]:
    return [
        item
        for node in path
        for item in node.items()
        if item.place is not Place.DISK and covering_copy(item) is None and (not whole_pages or _is_whole(cache, item))
    ]


def _is_whole(cache: PrefixCache, item: Item) -> bool:
    return isinstance(item, Page) and span(item)[1] % cache.page_tokens == 0


def _note_points(cache: PrefixCache, path: Sequence[Node], trail: Trail, now: float) -> None:
    assert cache.memory.disk is not None
    for node in path:
        for point in node.points.values():
            noted = Noted(trail.address(point), point.reason, point.kept, point.superseded)
            if noted != point.noted:
                point.noted = noted
                cache.memory.disk.put_point(
                    noted.address,
                    reason=noted.reason,
                    is_kept=noted.kept,
                    is_superseded=noted.superseded,
                    last_used=now,
                )
