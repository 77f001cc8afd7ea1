"""Recording: the tree takes over what a busy lane holds, and makes the restore points that were asked for.

A record begins at the sequence's hold, which is where the tree's knowledge of its tokens ends, and moves it forward. Models
of full attention alone need no restore points. Elsewhere a request makes them where the prompt leaves the tree, at the end
of system and tools, at the start of the last user message, at the end of every message that can be afforded, one token
before the prompt's end, at the end, and at regular distances in a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bough.cache.filling import Filler
from bough.cache.residency import LiveSequence, Memory, Residency
from bough.cache.residency.room import Room
from bough.cache.tree.node import Node, Reason
from bough.cache.tree.state import Group, Item, Lane, Page, Range, State
from bough.tokens import num_tokens
from bough.types import Boundary, Mark

POINT_SPACING = 16_384
"""A long prompt gets a restore point at every multiple of this, for prompts that part from it in between."""

REDUNDANT_SHARE = 0.2
"""Redundant restore points may take this share of their path's row bytes; those beyond it are dropped at once."""

LONG_EDGE_TOKENS = 16_384
"""An edge is copied when it grows. From this length on it grows only to the next page border; then a child follows it."""

_REASONS = {
    Mark.SYSTEM_END: Reason.SYSTEM,
    Mark.LAST_USER_START: Reason.LAST_USER,
    Mark.MESSAGE_END: Reason.MESSAGE,
}


@dataclass(frozen=True)
class Capture:
    """A restore point to be made when the lane gets there."""

    offset: int
    reason: Reason
    kept: bool = False

    @property
    def worth(self) -> tuple[bool, int, int]:
        """When not all captures fit, those worth least are given up first."""
        return self.kept, self.reason, self.offset

    def united(self, reason: Reason, *, kept: bool = False) -> Capture:
        """This capture, asked for again: the stronger reason stays."""
        return Capture(self.offset, max(self.reason, reason), self.kept or kept)


class CaptureCosts:
    """The bytes of restore points, and how many of them redundant ones may take."""

    def __init__(self, memory: Memory, room: Room) -> None:
        self._memory, self._room = memory, room

    def total_bytes(self, offsets: Iterable[int]) -> int:
        """Bytes of restore points at these offsets together: window rows that they share count once."""
        offsets = sorted(offsets)
        nbytes = len(offsets) * sum(group.state_bytes for group in self._memory.recurrent)
        for group in self._memory.windows:
            covered = 0
            for offset in offsets:
                nbytes += max(0, offset - max(covered, group.first_needed(offset))) * group.bytes_per_token
                covered = offset
        return nbytes

    def redundant_allowance(self, total: int) -> float:
        """Bytes that redundant restore points may take on a path of `total` tokens; any number without a budget."""
        is_bounded = self._room.budget_bytes is not None
        return REDUNDANT_SHARE * total * self._memory.row_bytes if is_bounded else float("inf")

    def choose(self, boundaries: Sequence[Boundary], total: int) -> list[Capture]:
        """The captures for a prompt's boundaries, without messages whose points would be over their share at once."""
        captures = [Capture(min(each.offset, total), _REASONS[each.mark]) for each in boundaries]
        allowance = self.redundant_allowance(total)
        chosen = []
        for capture in sorted(captures, key=lambda each: -each.offset):
            if capture.reason is Reason.MESSAGE:
                allowance -= self._memory.point_bytes(capture.offset)
            if allowance >= 0 or capture.reason is not Reason.MESSAGE:
                chosen.append(capture)
        return chosen


class Recorder:
    """Hands what lanes hold to the tree: after each prefill chunk, and when a session ends."""

    def __init__(self, residency: Residency, costs: CaptureCosts) -> None:
        self._memory = residency.memory
        self._room = residency.room
        self._evictor = residency.evictor
        self._saver = residency.saver
        self._sharer = residency.sharer
        self._filler = Filler(residency)
        self._costs = costs

    def record(self, sequence: LiveSequence, end: int, due: Sequence[Capture]) -> None:
        """Bring the tree up to the first `end` tokens of a lane.

        It gets the rows that it lacks, the captures that are due, and content that it knows but does not have in memory.
        Costs what is new. Content that does not fit into memory is left out, captures first.
        """
        found = sequence.trie.match(sequence.packed(sequence.hold.offset, end), start=sequence.hold)
        self._room.move_hold(sequence.trie, sequence.hold, found.node, found.length)
        end, due = self._fit(sequence, end, due)
        self._extend(sequence, end)
        for capture in due:
            if self._can_capture(sequence, capture.offset):
                self._capture(sequence, capture)
        self._filler.fill(sequence)
        self._saver.save_filled(sequence)
        if self._sharer is not None:
            self._sharer.share_filled(sequence)

    def _fit(self, sequence: LiveSequence, end: int, due: Sequence[Capture]) -> tuple[int, Sequence[Capture]]:
        """Make room for rows and captures. If not all fit, the least worthy captures are given up, then rows.

        In a model that needs restore points, rows without one are of no use: room for one is counted in.
        """
        at, kept = sequence.hold.offset, sorted(due, key=lambda capture: capture.worth)
        while True:
            offsets = {capture.offset for capture in kept} | ({end} if self._memory.needs_points else set())
            if self._make_room(sequence, end, offsets):
                return end, kept
            if not kept or offsets == {end}:
                return self._fit_less(sequence, at, end)
            needed = end if self._memory.needs_points else None  # room for a point there is counted in any case
            kept.remove(next(each for each in kept if each.offset != needed))

    def _fit_less(self, sequence: LiveSequence, at: int, end: int) -> tuple[int, Sequence[Capture]]:
        """The whole pages that fit, with a restore point at their end where one is needed and can still be made."""
        memory, lane = self._memory, sequence.lane
        if not memory.row_bytes or memory.recurrent:
            return at, []
        affordable = self._room.affordable_share if lane.shares_rows else self._room.affordable
        fitting = (affordable(sequence.trie) - memory.point_bytes(end)) // memory.row_bytes
        less = max(at, min(end, at + fitting) // memory.page_tokens * memory.page_tokens)
        if not less or any(lane.first_row(group) > group.first_needed(less) for group in memory.groups):
            return at, []
        if not self._make_room(sequence, less, {less}):
            return at, []
        return less, [Capture(less, Reason.END)] if memory.needs_points else []

    def _make_room(self, sequence: LiveSequence, end: int, offsets: set[int]) -> bool:
        """Make room for the rows from the hold up to `end`, and for restore points at these offsets."""
        at, memory = sequence.hold.offset, self._memory
        if not sequence.lane.shares_rows:
            nbytes = (end - at) * memory.row_bytes + self._costs.total_bytes(offsets)
            return self._room.make_room(nbytes, spare=sequence.slot, trie=sequence.trie)
        windows = {group: _window_rows(sequence.lane, group, offsets, end) for group in memory.windows}
        states_bytes = len(offsets) * sum(group.state_bytes for group in memory.recurrent)
        new_bytes = states_bytes + sequence.new_block_bytes(windows)
        share_bytes = new_bytes + sequence.new_block_bytes({group: [(at, end)] for group in memory.full})
        return self._room.make_room(new_bytes, sequence.slot, sequence.trie, share_bytes)

    def _extend(self, sequence: LiveSequence, end: int) -> None:
        """Add the tokens from the hold up to `end` to the tree, with their rows, and move the hold there."""
        start = sequence.hold.offset
        if start >= end:
            return
        nbytes = 0 if sequence.lane.shares_rows else (end - start) * self._memory.row_bytes
        pages = self._room.retry_after_eviction(lambda: self._publish(sequence, start, end), nbytes, sequence.slot)
        with _release_on_error(sequence, pages):
            node = self._add_edge(sequence, start, end)
        for page in pages:
            sequence.trie.add_page(node, page)
        self._room.move_hold(sequence.trie, sequence.hold, node, end)

    def _add_edge(self, sequence: LiveSequence, start: int, end: int) -> Node:
        """The node whose edge ends with the tokens [start, end): a leaf that grew, or a new child.

        Children that follow a long edge are merged with it when the session ends.
        """
        trie, node, tokens = sequence.trie, sequence.hold.node, sequence.packed(start, end)
        is_long = num_tokens(node.edge) >= LONG_EDGE_TOKENS and start % self._memory.page_tokens == 0
        if start == node.end and node.is_leaf and not node.is_root and not is_long:
            trie.grow(node, tokens)
            return node
        if start < node.end:
            node = self._saver.split_edge(trie, node, start)
        return trie.append(node, tokens, node.last_used)

    def _publish(self, sequence: LiveSequence, start: int, end: int) -> list[Page]:
        """Pages of all full-attention rows in [start, end); if one fails, those made before it are released."""
        pages = list[Page]()
        with _release_on_error(sequence, pages):
            for group in self._memory.full:
                for page in sequence.publish(group, start, end):
                    pages.append(page)  # one by one: the next may fail
        return pages

    def _can_capture(self, sequence: LiveSequence, offset: int) -> bool:
        """Whether lane and tree together still hold what a restore point at `offset` needs."""
        if offset > sequence.hold.offset:
            return False
        node, lane = sequence.hold.node.at(offset), sequence.lane
        if lane.offset != offset and self._missing_states(node, offset):
            return False
        for group in self._memory.windows:
            missing = node.missing_on_path(group, group.first_needed(offset), offset, self._memory.page_tokens)
            if any(low < lane.first_row(group) for low, _ in missing):
                return False
        return True

    def _missing_states(self, node: Node, offset: int) -> list[Group]:
        """The groups whose state a restore point at `offset` lacks."""
        known = node.points.get(offset)
        return [group for group in self._memory.recurrent if known is None or group not in known.states]

    def _capture(self, sequence: LiveSequence, capture: Capture) -> None:
        """Make a restore point with all that it needs, or none."""
        trie, lane, memory, offset = sequence.trie, sequence.lane, sequence.trie.memory, capture.offset
        node, states = sequence.hold.node.at(offset), list[State]()
        with _release_on_error(sequence, states):
            for group in self._missing_states(node, offset):
                take = partial(lane.capture, group)
                states.append(memory.add(self._room.retry_after_eviction(take, group.state_bytes, sequence.slot)))
        is_new = offset not in node.points
        point = trie.add_point(node, offset, capture.reason, kept=capture.kept)
        point.states |= {state.group: state for state in states}
        try:
            for group in self._missing_states(node, offset):  # making room has evicted them just now
                point.states[group] = memory.add(lane.capture(group))
            for group in self._memory.windows:
                trie.hold_window(node, point, group, sequence.publish)
        except BaseException:
            if is_new:
                trie.drop_point(node, point)
            raise
        self._evictor.offer(trie, node)


@contextmanager
def _release_on_error(sequence: LiveSequence, items: Sequence[Item]) -> Iterator[None]:
    """Release these items, which are not in the tree yet, if an exception leaves the context."""
    try:
        yield
    except BaseException:
        for item in items:
            sequence.trie.memory.release(item)
        raise


def _window_rows(lane: Lane, group: Group, offsets: Iterable[int], end: int) -> list[Range]:
    """The rows of a window up to `end` that a lane holds and restore points at these offsets need."""
    first = lane.first_row(group)
    return [(max(first, group.first_needed(at)), at) for at in offsets if first < at <= end]
