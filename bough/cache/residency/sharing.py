"""Sharing: whole pages and the restore points on them are offered to the store that machines share.

Nothing waits for it: its own thread packs and sends them. Only content in memory is offered; what is on disk alone was
offered before. A page in which paths part belongs to several nodes, and is sent in as many sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bough.cache.residency.lanes import LiveSequence
from bough.cache.residency.memory import Memory, SaltTrie
from bough.cache.store import Section, SharedStore, StorePath
from bough.cache.store.format import ListedPoint
from bough.cache.store.uploader import PointList, Upload
from bough.cache.tree.address import Address
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import ContentStore, Group, Item, Kind, Page, Tier


@dataclass(frozen=True)
class OfferedPath:
    """The part of a path that was offered: everything in memory up to page `end`, at these addresses, in their order."""

    end: int
    addresses: Sequence[Address]


class Sharer:
    """Offers what a path holds."""

    def __init__(self, memory: Memory, shared: SharedStore) -> None:
        self._memory, self._shared = memory, shared

    def share_filled(self, sequence: LiveSequence) -> None:
        """Offer the pages that have filled since the last time; the first time, all of the path. Costs what is new."""
        if not self._memory.full:
            return
        path = sequence.store_path = sequence.store_path or self._shared.path(sequence.trie.salt)
        path.add(sequence.packed(path.num_tokens, sequence.hold.offset))
        nodes = sequence.hold.node.path()
        for page in range(sequence.num_shared, path.num_pages):
            self._offer_rows(nodes, path, page)
        sequence.num_shared = path.num_pages

    def share(self, sequence: LiveSequence, nodes: Sequence[Node]) -> None:
        """Offer what the path of a sequence that has ended holds: the last pages, and all restore points."""
        path = sequence.store_path or self._shared.path(sequence.trie.salt)
        path.add(sequence.packed(path.num_tokens, sequence.hold.offset))
        for page in range(sequence.num_shared, path.num_pages):
            self._offer_rows(nodes, path, page)
        for page in range(path.num_pages if self._memory.needs_points else 0):
            self._offer_points(nodes, path, page)

    def share_prefix(self, trie: SaltTrie, path: StorePath, tokens: bytes, first: int = 0) -> OfferedPath:
        """Offer the whole pages of a prefix from page `first` on, as far as the tree has them."""
        offered = list[Address]()
        found = trie.match(tokens)
        end = max(first, min(path.num_pages, found.length // path.page_tokens))
        for page in range(first, end):
            offered += self._offer_rows(found.path, path, page)
            if self._memory.needs_points:
                offered += self._offer_points(found.path, path, page)
        return OfferedPath(end, offered)

    def _offer_rows(self, nodes: Sequence[Node], path: StorePath, page: int) -> list[Address]:
        start, end = page * path.page_tokens, (page + 1) * path.page_tokens
        items = list[Item]()
        for group in self._memory.full:
            held = _rows(nodes, group, start, end)
            if held is None:
                return []
            items += held
        if not items:
            return []
        self._offer(path.rows(page), items)
        return [path.rows(page)]

    def _offer(self, address: Address, items: Sequence[Item]) -> None:
        content = self._memory.content
        nbytes = sum(content.packed_bytes(item) for item in items)
        self._shared.uploader.offer(Upload(address, nbytes, partial(_pack, content, items)))

    def _offer_points(self, nodes: Sequence[Node], path: StorePath, page: int) -> list[Address]:
        """Offer what the restore points of a page need, and then the list of those.

        Points of which something is not in memory are not listed: they were before, or cannot be sent.
        """
        start, end = page * path.page_tokens, (page + 1) * path.page_tokens
        listed = dict[ListedPoint, Address]()
        for node in nodes:
            for point in node.points.values() if node.start < end and start < node.end else ():
                items = self._needed(nodes, point) if start < point.offset <= end else None
                if items is not None:
                    address = path.point(point.offset)
                    listed[ListedPoint(point.offset, int(point.reason))] = address
                    self._offer(address, items)
        self._shared.uploader.offer(PointList(path.points(page), listed))
        return [*listed.values(), path.points(page)]

    def _needed(self, nodes: Sequence[Node], point: Point) -> list[Item] | None:
        """The states and window rows that a restore point needs; None if one is not in memory."""
        items = list[Item]()
        for group in self._memory.groups:
            if group.kind is Kind.RECURRENT:
                state = point.states.get(group)
                if state is None or state.tier is Tier.DISK:
                    return None
                items.append(state)
            elif group.kind is Kind.WINDOW:
                rows = _rows(nodes, group, group.first_needed(point.offset), point.offset)
                if rows is None:
                    return None
                items += rows
        return items


def _rows(nodes: Sequence[Node], group: Group, start: int, end: int) -> list[Page] | None:
    """The pages that hold rows [start, end) of a group, in order; None if some are missing or not in memory."""
    pages, at = list[Page](), start
    for node in nodes:
        for page in node.pages_between(group, start, end) if node.start < end and start < node.end else ():
            if page.start > at or page.tier is Tier.DISK:
                return None
            pages.append(page)
            at = page.end
    return pages if at >= end else None


def _pack(store: ContentStore, items: Sequence[Item]) -> list[Section] | None:
    """The content of these items; None if one has left memory. Runs on the uploader's thread."""
    sections = []
    for item in items:
        data = store.pack(item)
        if data is None:
            return None
        sections.append(Section(item.group.index, *item.span, data))
    return sections
