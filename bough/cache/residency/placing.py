"""Placing: content that was computed elsewhere is put into the tree, page by page, each whole or not at all.

A `Placer` does it with what was fetched from the shared store. It moves a hold along with what it has placed, so that this
stays until the request stands on it. `AddedEdges` are also those of what is on disk (`cache/restore.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from bough.cache.residency.loading import Loader, TierLoad
from bough.cache.residency.memory import SaltTrie, empty_page
from bough.cache.residency.policy import is_empty_leaf
from bough.cache.store import Section
from bough.cache.store.format import ListedPoint, Object
from bough.cache.tree.node import Hold, Node, Reason
from bough.cache.tree.state import Group, Page, State, Tier, page_ranges
from bough.cache.tree.trie import Match
from bough.errors import EngineError
from bough.tokens import cut

log = logging.getLogger(__name__)


class AddedEdges:
    """Adds edges to a trie for content from outside. A leaf that was added here grows; other nodes get a child.

    `split` parts an edge and returns its new head; it may raise EngineError or MemoryError.
    """

    def __init__(self, trie: SaltTrie, split: Callable[[Node, int], Node]) -> None:
        self._trie, self._split = trie, split
        self._nodes: set[Node] = set()

    def add(self, node: Node, at: int, tokens: bytes, last_used: float = 0.0) -> Node:
        """Add tokens after offset `at` of a node; returns the node that they end in. Their rows must follow at once.

        Raises what `split` does, and then nothing has changed.
        """
        if at < node.end:
            node = self._split(node, at)
        elif node in self._nodes and node.is_leaf:
            self._trie.grow(node, tokens)
            return node
        child = self._trie.append(node, tokens, last_used)
        child.hits = 1
        self._nodes.add(child)
        return child

    def is_empty(self, node: Node) -> bool:
        """Whether a node is a leaf that was added here and holds nothing."""
        return node in self._nodes and is_empty_leaf(node) and not node.points


@dataclass(frozen=True)
class _Rows:
    """Rows [start, end) of a section."""

    section: Section
    start: int
    end: int


def _cover(found: Object, group: Group, low: int, high: int) -> list[_Rows] | None:
    """Rows [low, high) of an object, each part from the section that reaches furthest; None if some are missing."""
    offered, parts = [each for each in found.sections if each.group == group.index], list[_Rows]()
    while low < high:
        best = max((each for each in offered if each.start <= low < each.end), key=lambda each: each.end, default=None)
        if best is None:
            return None
        parts.append(_Rows(best, low, min(high, best.end)))
        low = parts[-1].end
    return parts


class Placer:
    """Puts what a load has fetched for one prompt into the tree. `hold` protects what the tree has of it."""

    def __init__(self, loader: Loader, load: TierLoad[Any, Any], trie: SaltTrie, prompt: bytes, hold: Hold) -> None:
        self._loader, self._load, self._memory = loader, load, loader.memory
        self._trie, self._prompt, self._hold = trie, prompt, hold
        self._added = AddedEdges(trie, partial(loader.saver.split_edge, trie))

    def page_bytes(self) -> int:
        """The memory that the rows of one page will take where they go."""
        return sum(self._row_bytes(group, 0, self._memory.page_tokens) for group in self._memory.full)

    def point_bytes(self, offset: int) -> int:
        """The most memory that what a restore point needs will take."""
        memory = self._memory
        nbytes = sum(memory.load_bytes(State(group, offset, None, 0, Tier.DISK)) for group in memory.recurrent)
        for group in memory.windows:
            ranges = page_ranges(group.first_needed(offset), offset, memory.page_tokens)
            nbytes += sum(self._row_bytes(group, low, high) for low, high in ranges)
        return nbytes

    def _row_bytes(self, group: Group, start: int, end: int) -> int:
        return self._memory.load_bytes(empty_page(group, start, end))

    def place_rows(self, page: int, found: Object) -> bool | None:
        """Put the rows of a page into the tree; returns whether it lacked any, or None if that cannot be done."""
        size = self._memory.page_tokens
        start, end = page * size, (page + 1) * size
        match = self.match(end)
        self.hold(match.node, match.length)  # making room leaves what the tree has
        missing = self._missing(found, match, start, end)
        if missing is None:
            return None
        nbytes = sum(self._row_bytes(group, rows.start, rows.end) for group in missing for rows in missing[group])
        if not self._load.take_room(nbytes):
            return None
        if not self._add_rows(missing, end):
            return None
        return any(missing.values())

    def _missing(self, found: Object, match: Match, start: int, end: int) -> dict[Group, list[_Rows]] | None:
        """The rows [start, end) that the tree lacks beside a match; None if the object does not have them."""
        missing = dict[Group, list[_Rows]]()
        for group in self._memory.full:
            ranges = list(match.node.missing_on_path(group, start, min(end, match.length), self._memory.page_tokens))
            if match.length < end:
                ranges.append((max(start, match.length), end))
            parts = [_cover(found, group, low, high) for low, high in ranges]
            missing[group] = [rows for part in parts for rows in part or ()]
            if None in parts:
                return None
        return missing

    def match(self, end: int) -> Match:
        """The part of the prompt up to an offset that the tree has."""
        return self._trie.match(cut(self._prompt, min(self._hold.offset, end), end), start=self._hold)

    def _add_rows(self, missing: dict[Group, list[_Rows]], end: int) -> bool:
        """Make pages of the rows, and then the edge that they lie on; all of it or nothing."""
        pages, memory = list[Page](), self._trie.memory
        try:
            for group in missing:
                for rows in missing[group]:
                    pages.append(self._unpack(group, rows))
            last = self._add_edge(end)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("rows of the store could not be put into the tree: %s", error)
            self._loader.counts.failed_loads += 1
            for page in pages:
                memory.release(page)
            return False
        filled = set[Node]()
        for page in pages:
            node = last.at(page.end)  # only now: edges were split
            self._trie.add_page(node, page)
            filled.add(node)
        self._loader.evictor.offer_filled(self._trie, filled)
        self.hold(last, end)
        return True

    def _unpack(self, group: Group, rows: _Rows) -> Page:
        section, wanted = rows.section, (rows.start, rows.end)
        held = (section.start, section.end)
        data = section.data if held == wanted else bytearray(section.data)  # the engine may keep it
        return self._trie.memory.unpack_rows(group, held, data, wanted)

    def _add_edge(self, end: int) -> Node:
        """The node in which the prompt's first `end` tokens end; made if there is none. May raise EngineError."""
        match = self.match(end)
        if match.length >= end:
            return match.node.at(end)
        tokens = cut(self._prompt, match.length, end)
        return self._added.add(match.node, match.length, tokens, self._loader.use_clock.now())

    def hold(self, node: Node, offset: int) -> None:
        """Keep what has come until the request stands on it."""
        if offset > self._hold.offset:
            self._loader.room.move_hold(self._trie, self._hold, node, offset)
        self._loader.evictor.offer(self._trie, node)

    def place_point(self, listed: ListedPoint, found: Object) -> bool:
        """Make a restore point with all that it needs; False if that cannot be done."""
        nbytes = self.point_bytes(listed.offset)
        if not self._has_all(listed.offset, found) or not self._load.take_room(nbytes):
            return False
        memory, states = self._trie.memory, dict[Group, State]()
        node = None
        try:
            for group in self._memory.recurrent:
                section = next(each for each in found.sections if each.group == group.index)
                states[group] = memory.unpack_state(group, listed.offset, section.data)
            node = self._add_edge(listed.offset)
            self._attach(node, listed, states, found)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("a restore point of the store could not be put into the tree: %s", error)
            self._loader.counts.failed_loads += 1
            for state in states.values():
                memory.release(state)
            if node is not None and self._added.is_empty(node):  # it was there for the restore point alone
                self._loader.evictor.remove(self._trie, node)
            return False
        self.hold(node, listed.offset)
        return True

    def _has_all(self, offset: int, found: Object) -> bool:
        """Whether an object has everything that restoring at an offset needs."""
        for group in self._memory.recurrent:
            if [(each.start, each.end) for each in found.sections if each.group == group.index] != [(offset, offset)]:
                return False
        windows = self._memory.windows
        return all(_cover(found, group, group.first_needed(offset), offset) is not None for group in windows)

    def _attach(self, node: Node, listed: ListedPoint, states: dict[Group, State], found: Object) -> None:
        """Add a restore point; if its window rows cannot be made, none. Takes the states, if it succeeds."""
        trie, known = self._trie, node.points.get(listed.offset)

        def publish(group: Group, start: int, end: int) -> Iterator[Page]:
            return (self._unpack(group, rows) for rows in _cover(found, group, start, end) or ())

        point = trie.add_point(node, listed.offset, Reason(listed.reason))
        try:
            for group in self._memory.windows:
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
