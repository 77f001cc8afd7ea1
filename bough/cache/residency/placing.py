"""Placing: what was fetched from the shared store is put into the tree, page by page, each whole or not at all.

A `Placer` reserves the bytes of what is on its way, and moves a pin along with what it has placed, so that this stays until
the request stands on it.

Always true between calls (the loader's `check` asserts it): what it has reserved is counted in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.loading import Loader
from bough.cache.residency.memory import Memory, SaltTrie
from bough.cache.residency.rates import Clock
from bough.cache.residency.room import Room
from bough.cache.residency.saving import Saver
from bough.cache.store import Section
from bough.cache.store.format import ListedPoint, Object
from bough.cache.tree.node import Node, Pin, Reason
from bough.cache.tree.state import Group, Kind, Page, State, Tier, page_ranges
from bough.cache.tree.tokens import cut
from bough.cache.tree.trie import Match
from bough.errors import EngineError

log = logging.getLogger(__name__)

Shortage = Callable[[int], int]
"""How many bytes are missing on the device for so many more, beside what the request needs for itself."""


@dataclass(frozen=True)
class Parts:
    """What placing needs of the residency; `full` are the groups with full attention."""

    memory: Memory
    evictor: Evictor
    room: Room
    saver: Saver
    loader: Loader
    page_tokens: int
    clock: Clock
    full: Sequence[Group]


@dataclass(frozen=True)
class _Rows:
    """Rows that are missing in the tree, and the section that has them."""

    group: Group
    section: Section
    start: int
    end: int


class Placer:
    """Puts what was fetched for one prompt into the tree. `pin` holds what the tree has of it."""

    def __init__(self, parts: Parts, trie: SaltTrie, prompt: bytes, pin: Pin, shortage: Shortage) -> None:
        self.reserved_bytes = 0
        self._parts, self._trie, self._prompt = parts, trie, prompt
        self._pin, self._shortage = pin, shortage
        self._own: set[Node] = set()

    def page_bytes(self) -> int:
        """What the rows of one page will take where they go."""
        size = self._parts.page_tokens
        return sum(self._item_bytes(group, 0, size) for group in self._parts.full)

    def point_bytes(self, offset: int) -> int:
        """The most that what a restore point needs will take."""
        nbytes = 0
        for group in self._parts.memory.groups:
            if group.kind is Kind.RECURRENT:
                nbytes += self._device_bytes(State(group, offset, None, 0, Tier.DISK))
            elif group.kind is Kind.WINDOW:
                for low, high in page_ranges(group.first_needed(offset), offset, self._parts.page_tokens):
                    nbytes += self._item_bytes(group, low, high)
        return nbytes

    def _item_bytes(self, group: Group, start: int, end: int) -> int:
        return self._device_bytes(Page(group, start, end, None, 0, tier=Tier.DISK))

    def _device_bytes(self, item: Page | State) -> int:
        if self._parts.loader.tier is not Tier.DEVICE:
            return item.content_bytes
        return self._parts.memory.store.device_bytes(item)

    def make_room(self, nbytes: int) -> bool:
        """Reserve so many bytes in all where fetched content goes; False if there is no room for more than now."""
        extra, fetcher = nbytes - self.reserved_bytes, self._parts
        if extra > 0:
            if fetcher.loader.tier is Tier.HOST:
                has_room = fetcher.evictor.make_host_room(extra, self._trie)
            else:
                has_room = not self._shortage(extra) and fetcher.room.make_room(extra, trie=self._trie)
            if not has_room:
                return False
        self.reserve(nbytes)
        return True

    def reserve(self, nbytes: int) -> None:
        self._trie.memory.reserve(self._parts.loader.tier, nbytes - self.reserved_bytes)
        self.reserved_bytes = nbytes

    def place_rows(self, page: int, found: Object) -> bool | None:
        """Put the rows of a page into the tree; tells whether it lacked any. None if that cannot be done."""
        size = self._parts.page_tokens
        start, end = page * size, (page + 1) * size
        missing = self._missing(found, start, end)
        if missing is None:
            return None
        nbytes = sum(self._item_bytes(rows.group, rows.start, rows.end) for rows in missing)
        if not self.make_room(max(self.reserved_bytes, nbytes)):
            return None
        missing = self._missing(found, start, end) or []  # again: making room may have merged nodes
        self.reserve(max(0, self.reserved_bytes - nbytes))
        if not self._add_rows(missing, end):
            return None
        return bool(missing)

    def _missing(self, found: Object, start: int, end: int) -> list[_Rows] | None:
        """The rows [start, end) that the tree lacks; None if the object does not have them."""
        match, missing = self.match(end), list[_Rows]()
        for group in self._parts.full:
            ranges = [
                held
                for node in match.path
                if node.end > start
                for held in node.missing_between(group, start, min(end, match.length), self._parts.page_tokens)
            ]
            if match.length < end:
                ranges.append((max(start, match.length), end))
            for low, high in ranges:
                rows = list(_cover(found.sections, group, low, high))
                if sum(each.end - each.start for each in rows) != high - low:
                    return None
                missing += rows
        return missing

    def match(self, end: int) -> Match:
        """What the tree has of the prompt up to an offset."""
        return self._trie.match(cut(self._prompt, min(self._pin.offset, end), end), start=self._pin)

    def _add_rows(self, missing: Sequence[_Rows], end: int) -> bool:
        """Make pages of the rows, and then the edge that they lie on; all of it or nothing."""
        pages, memory = list[Page](), self._trie.memory
        try:
            for rows in missing:
                held, data = (rows.section.start, rows.section.end), rows.section.data
                is_whole = held == (rows.start, rows.end)
                wanted = memory.unpack_rows(rows.group, held, data if is_whole else bytearray(data), (rows.start, rows.end))
                pages.append(wanted)
            last = self._reach(end)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("rows of the store could not be put into the tree: %s", error)
            self._parts.loader.counts.failed_loads += 1
            for page in pages:
                memory.release(page)
            return False
        path, filled = last.path(), set[Node]()
        for page in pages:
            node = next(node for node in path if node.start <= page.start < node.end)  # now: edges were split
            self._trie.add_page(node, page)
            filled.add(node)
        for node in filled:
            self._note_filled(node)
        self.hold(last, end)
        return True

    def _note_filled(self, node: Node) -> None:
        """A node has got rows: perhaps it has no holes any more."""
        node.has_holes = node.has_holes and any(
            any(node.missing_between(group, node.start, node.end, self._parts.page_tokens)) for group in self._parts.full
        )
        self._parts.evictor.offer(self._trie, node)

    def _reach(self, end: int) -> Node:
        """The node in which the prompt's first `end` tokens end; made if there is none. May raise EngineError."""
        match, trie, evictor = self.match(end), self._trie, self._parts.evictor
        node, tokens = match.node, cut(self._prompt, match.length, end)
        if match.length >= end:
            return next((each for each in match.path if each.start < end <= each.end), node)
        if match.length < node.end:
            tail, node = node, trie.split(node, match.length)
            self._parts.saver.note_split(trie, tail)
            evictor.offer(trie, tail)
            evictor.offer(trie, node)
        elif node in self._own and node.is_leaf:
            trie.grow(node, tokens)
            return node
        child = trie.append(node, tokens, self._parts.clock.now())
        child.hits = 1
        self._own.add(child)
        return child

    def hold(self, node: Node, offset: int) -> None:
        """Keep what has come until the request stands on it."""
        if offset > self._pin.offset:
            self._parts.room.hold(self._trie, self._pin, node, offset)
        self._parts.evictor.offer(self._trie, node)

    def place_point(self, listed: ListedPoint, found: Object) -> bool:
        """Make a restore point with all that it needs; False if that cannot be done."""
        if not self._has_all(listed.offset, found) or not self.make_room(
            max(self.reserved_bytes, self.point_bytes(listed.offset))
        ):
            return False
        self.reserve(max(0, self.reserved_bytes - self.point_bytes(listed.offset)))
        memory, states = self._trie.memory, dict[Group, State]()
        node = None
        try:
            for group in self._parts.memory.groups:
                if group.kind is Kind.RECURRENT:
                    section = next(each for each in found.sections if each.group == group.index)
                    states[group] = memory.unpack_state(group, listed.offset, section.data)
            node = self._reach(listed.offset)
            self._attach(node, listed, states, found)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("a restore point of the store could not be put into the tree: %s", error)
            self._parts.loader.counts.failed_loads += 1
            for state in states.values():
                memory.release(state)
            if node is not None and node in self._own and node.is_leaf and not node.points and not any(node.items()):
                self._parts.evictor.remove(self._trie, node)
            return False
        self.hold(node, listed.offset)
        return True

    def _has_all(self, offset: int, found: Object) -> bool:
        """Whether an object has everything that restoring at an offset needs."""
        for group in self._parts.memory.groups:
            held = [each for each in found.sections if each.group == group.index]
            if group.kind is Kind.RECURRENT and [(each.start, each.end) for each in held] != [(offset, offset)]:
                return False
            if group.kind is Kind.WINDOW:
                start = group.first_needed(offset)
                if sum(rows.end - rows.start for rows in _cover(held, group, start, offset)) != offset - start:
                    return False
        return True

    def _attach(self, node: Node, listed: ListedPoint, states: dict[Group, State], found: Object) -> None:
        """Add a restore point; if its window rows cannot be made, none. Takes the states, if it succeeds."""
        trie, known = self._trie, node.points.get(listed.offset)

        def publish(group: Group, start: int, end: int) -> Iterator[Page]:
            for rows in _cover(found.sections, group, start, end):
                held, data = (rows.section.start, rows.section.end), bytearray(rows.section.data)
                yield trie.memory.unpack_rows(group, held, data, (rows.start, rows.end))

        point = trie.add_point(node, listed.offset, Reason(listed.reason))
        try:
            for group in self._parts.memory.groups:
                if group.kind is Kind.WINDOW:
                    trie.hold_window(node, point, group, publish)
        except BaseException:
            if known is None:
                trie.drop_point(node, point)
            raise
        for group, state in states.items():
            if group in point.states:
                trie.memory.release(state)
            else:
                point.states[group] = state


def _cover(sections: Sequence[Section], group: Group, low: int, high: int) -> Iterator[_Rows]:
    """The parts of rows [low, high) that sections of a group have, in order, each once."""
    held = (each for each in sections if each.group == group.index and each.start < each.end)
    for section in sorted(held, key=lambda each: each.start):
        end = min(high, section.end)
        if section.start <= low < end:
            yield _Rows(group, section, low, end)
            low = end
