"""Filling: content that the tree knows and does not have on the device is taken from a lane that holds it.

Rows and states are on disk alone where computing was estimated to be quicker than loading; rows are missing after a load
that failed. Once a lane has computed them they are in memory again, so that the next turn finds them there when another
request has taken the lane. Content that was on disk keeps its files: demoting it again costs no write. Rows on the host are
promoted when the request ends, and older content is demoted for them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.cache.residency import LaneSlot, LiveSequence, Residency
from bough.cache.tree.node import Node
from bough.cache.tree.state import Group, Item, Kind, Lane, Page, Range, State, Tier, page_ranges
from bough.errors import EngineError

log = logging.getLogger(__name__)

HIGH_WATER = 0.9
"""Idle content is demoted from the device to the host as soon as this share of the budget is used."""


@dataclass(frozen=True)
class _Gap:
    """Rows [start, end) of a node, or a state, that are not in memory: `item` is the one on disk, or None for a hole."""

    node: Node
    group: Group
    start: int
    end: int
    item: Item | None = None

    @property
    def nbytes(self) -> int:
        return self.group.state_bytes if self.is_state else (self.end - self.start) * self.group.bytes_per_token

    @property
    def is_state(self) -> bool:
        return self.group.kind is Kind.RECURRENT


@dataclass(frozen=True)
class _Bytes:
    """New memory on the device, and bytes that count for the share of a salt."""

    new: int
    share: int


class Filler:
    """Takes from lanes what their paths lack in memory."""

    def __init__(self, residency: Residency) -> None:
        self._memory = residency.memory
        self._room = residency.room
        self._evictor = residency.evictor

    def fill(self, sequence: LiveSequence) -> None:
        """Take what is missing below the hold from the lane, the shallowest first, as far as there is room.

        Room stays for the rows that are still to come: they exist nowhere else. Costs a look at the pages since the last
        time; where there are holes, at all pages from the first node with one.
        """
        holes = [node.start for node in sequence.hold.node.path() if node.has_holes]
        start, end = min([sequence.filled_to, *holes]), sequence.hold.offset
        if gaps := self._gaps(sequence, start, end):
            end = self._fitting_end(sequence, start, gaps)
            needed = self._needed(sequence, _up_to(gaps, end))
            has_room = end > start and self._room.make_room(needed.new, sequence.slot, sequence.trie, needed.share)
            if not has_room or not self._take(sequence, start, end):
                return
        sequence.filled_to = end // self._memory.page_tokens * self._memory.page_tokens

    def _gaps(self, sequence: LiveSequence, start: int, end: int) -> list[_Gap]:
        """The parts of [start, end) that the lane holds and that are not in memory."""
        gaps = list[_Gap]()
        for node in sequence.hold.node.path():
            if node.end > start:
                gaps += self._missing(node, start, end)
                gaps += self._pages_on_disk(sequence.lane, node, start, end)
                gaps += _states_on_disk(sequence.lane, node, end)
        return gaps

    def _missing(self, node: Node, start: int, end: int) -> Iterator[_Gap]:
        for group in self._memory.full if node.has_holes else ():
            for low, high in node.missing_between(group, start, end, self._memory.page_tokens):
                yield _Gap(node, group, low, high)

    def _pages_on_disk(self, lane: Lane, node: Node, start: int, end: int) -> Iterator[_Gap]:
        for group in (*self._memory.full, *self._memory.windows):
            for page in node.pages_between(group, start, end):
                if page.tier is Tier.DISK and page.end <= end and holds_page(lane, page):
                    yield _Gap(node, group, page.start, page.end, page)

    def _fitting_end(self, sequence: LiveSequence, start: int, gaps: Sequence[_Gap]) -> int:
        """The last page border, or the hold, up to which everything fits."""
        ends = [end for _, end in page_ranges(start, sequence.hold.offset, self._memory.page_tokens)]
        num_fitting = bisect_left(ends, True, key=lambda end: not self._fits(sequence, _up_to(gaps, end)))
        return ends[num_fitting - 1] if num_fitting else start

    def _fits(self, sequence: LiveSequence, gaps: Sequence[_Gap]) -> bool:
        """Whether there is room for these, and for what the sequence may still record."""
        needed, later = self._needed(sequence, gaps), self._later(sequence)
        return self._room.can_make_room(needed.new + later.new, sequence.slot, sequence.trie, needed.share + later.share)

    def _later(self, sequence: LiveSequence) -> _Bytes:
        """The rows after the hold, up to the end for which room is reserved, and a restore point there."""
        num_rows = max(0, sequence.total_tokens - sequence.hold.offset)
        if not num_rows:
            return _Bytes(0, 0)
        rows, point = num_rows * self._memory.row_bytes, self._memory.point_bytes(sequence.total_tokens)
        return _Bytes(point if sequence.lane.shares_rows else point + rows, point + rows)

    def _needed(self, sequence: LiveSequence, gaps: Sequence[_Gap]) -> _Bytes:
        if not sequence.lane.shares_rows:
            nbytes = sum(gap.nbytes for gap in gaps)
            return _Bytes(nbytes, nbytes)
        rows: dict[Kind, dict[Group, list[Range]]] = {Kind.FULL: {}, Kind.WINDOW: {}}
        for gap in gaps:
            if not gap.is_state:
                rows[gap.group.kind].setdefault(gap.group, []).append((gap.start, gap.end))
        states = sum(gap.nbytes for gap in gaps if gap.is_state)
        new = states + sequence.new_block_bytes(rows[Kind.WINDOW])
        return _Bytes(new, new + sequence.new_block_bytes(rows[Kind.FULL]))

    def _take(self, sequence: LiveSequence, start: int, end: int) -> bool:
        """Take all of [start, end), for which there is room; False if the engine has no memory for it after all."""
        gaps = self._gaps(sequence, start, end)  # again: making room may have dropped restore points
        try:
            for gap in gaps:
                if gap.item is not None:
                    take_from_lane(sequence, gap.node, gap.item)
                    continue
                for page in sequence.publish(gap.group, gap.start, gap.end):
                    sequence.trie.add_page(gap.node, page)
        except (EngineError, MemoryError) as error:
            log.warning("rows of [%d, %d) are not in memory: %s", start, end, error)
            return False
        finally:
            self._evictor.offer_filled(sequence.trie, {gap.node for gap in gaps})
        return True


class Promoter:
    """Keeps on the device what was used last, as far as there is room, where a host tier takes the rest."""

    def __init__(self, residency: Residency) -> None:
        self._memory = residency.memory
        self._room = residency.room
        self._evictor = residency.evictor
        self._lanes = residency.lanes

    def promote(self, sequence: LiveSequence, path: Sequence[Node]) -> None:
        """Bring recorded rows on the host back to the device: from the lane, which holds them too.

        As far as there is room. A page that making room for others has taken from the host is left out.
        """
        if not self._memory.host_budget_bytes or self._room.budget_bytes is None:
            return
        for node, page in _pages_on_host(sequence, path):
            has_room = self._demote_older(sequence, node, page)
            if page.tier is not Tier.HOST or node.pages_between(page.group, *page.span) != [page]:
                continue
            if not has_room:
                return
            try:
                take_from_lane(sequence, node, page)
            except (EngineError, MemoryError):
                return
            self._evictor.offer(sequence.trie, node)

    def _demote_older(self, sequence: LiveSequence, node: Node, page: Page) -> bool:
        """Demote older content, so that this page fits on the device, and into its salt's share."""
        assert self._room.budget_bytes is not None
        memory, lane = sequence.trie.memory, sequence.lane
        nbytes = share_bytes = page.nbytes
        if lane.shares_rows:
            block = lane.spans(page.group, *page.span)[0].block
            share_bytes = 0 if block is None or memory.has_pages_in(block) else block.nbytes
            nbytes = share_bytes if page.group.kind is Kind.WINDOW else 0
        if memory.num_bytes[Tier.DEVICE] + share_bytes > self._evictor.share_of(self._room.budget_bytes):
            return False
        while not self._is_low(nbytes):
            oldest = self._evictor.order.peek(Tier.DEVICE)
            if oldest is None or oldest.node.last_used >= node.last_used or not self._demote_one(sequence.slot):
                return False
        return True

    def _demote_one(self, spare: LaneSlot | None = None) -> bool:
        """Demote content to the host; or clear an idle lane, if it alone holds what was demoted before."""
        return self._lanes.clear_oldest_idle(spare, is_sharing=True) or self._evictor.demote_one()

    def _is_low(self, extra_bytes: int = 0) -> bool:
        """Whether the device would be used below its high-water mark."""
        assert self._room.budget_bytes is not None
        return self._room.used_bytes + extra_bytes <= HIGH_WATER * self._room.budget_bytes

    def demote_ahead(self) -> None:
        """Demote idle content to the host before the device is full, so that the next request finds room."""
        if not self._memory.host_budget_bytes or self._room.budget_bytes is None:
            return
        while not self._is_low() and self._demote_one():
            pass


def _up_to(gaps: Sequence[_Gap], end: int) -> list[_Gap]:
    return [gap for gap in gaps if gap.end <= end]


def _states_on_disk(lane: Lane, node: Node, end: int) -> Iterator[_Gap]:
    """The states at the one offset at which the lane can capture them: its own."""
    point = node.points.get(lane.offset) if lane.offset <= end else None
    for group, state in point.states.items() if point is not None else ():
        if state.tier is Tier.DISK:
            yield _Gap(node, group, state.offset, state.offset, state)


def holds_page(lane: Lane, page: Page) -> bool:
    """Whether a lane that stands at or beyond the end of a page holds its rows, in one block if in any."""
    return lane.first_row(page.group) <= page.start and len(lane.spans(page.group, *page.span)) == 1


def take_from_lane(sequence: LiveSequence, node: Node, old: Item) -> None:
    """Replace an item of a lower tier by what the lane holds, on the device; its files stay.

    Raises EngineError or MemoryError if there is no memory for it after all; then nothing has changed.
    """
    lane, memory = sequence.lane, sequence.trie.memory
    fresh: Page | State
    if isinstance(old, Page):
        fresh = memory.add(lane.publish(old.group, old.start, old.end))
    else:
        fresh = memory.add(lane.capture(old.group))
    memory.hand_over(old, fresh)
    sequence.trie.replace(node, old, fresh)


def _pages_on_host(sequence: LiveSequence, path: Sequence[Node]) -> list[tuple[Node, Page]]:
    """The recorded pages of a path that are on the host, and whose rows the lane holds."""
    end, lane = min(sequence.hold.offset, sequence.lane.offset), sequence.lane
    return [
        (node, page)
        for node in path
        for pages in node.pages.values()
        for page in pages
        if page.tier is Tier.HOST and page.end <= end and holds_page(lane, page)
    ]
