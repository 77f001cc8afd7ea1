"""Recording: the tree takes over what a busy lane holds, and makes the restore points that were asked for.

A record begins at the sequence's pin, which stands where the tree's knowledge of its tokens ends, and moves it forward.
Models of full attention alone need no restore points. Elsewhere a request makes them where the prompt leaves the tree, at
the end of system and tools, at the start of the last user message, at the end of every message that can be afforded, one
token before the prompt's end, at the end, and every so often on the way through a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bough.cache.filling import Filler
from bough.cache.residency import LiveSequence, Residency
from bough.cache.tree.node import Node, Reason
from bough.cache.tree.state import Group, Kind, Lane, Page, Range, State
from bough.cache.tree.tokens import num_tokens
from bough.types import Boundary, Mark

POINT_SPACING = 16_384
"""A long prompt gets a restore point at every multiple of this, for prompts that part from it in between."""

REDUNDANT_SHARE = 0.2
"""Redundant restore points may take this share of their path's row bytes; what is beyond is dropped at once."""

LONG_EDGE_TOKENS = 16_384
"""An edge is copied when it grows. One of so many tokens grows only to the next page border; then a child follows it."""

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
        """A larger one is given up later when not all fit."""
        return self.kept, self.reason, self.offset

    def united(self, reason: Reason, *, kept: bool = False) -> Capture:
        """This capture, asked for again: the stronger reason stays."""
        return Capture(self.offset, max(self.reason, reason), self.kept or kept)


class CaptureCosts:
    """What rows and restore points of one model cost, and how much redundant ones may take."""

    def __init__(self, groups: Sequence[Group], is_bounded: bool) -> None:
        self._groups = [group for group in groups if group.kind is not Kind.FULL]
        self.is_bounded = is_bounded  # without a budget, redundant points may take what they like
        self.row_bytes = sum(group.bytes_per_token for group in groups if group.kind is Kind.FULL)
        self.needs_points = bool(self._groups)

    def point_bytes(self, offset: int) -> int:
        """The most that a restore point at `offset` costs, beside the rows of full attention."""
        return sum(group.needed_bytes(offset) for group in self._groups)

    def state_bytes(self, num_points: int) -> int:
        """What the states of so many restore points cost."""
        return num_points * sum(group.state_bytes for group in self._groups)

    def total_bytes(self, offsets: Iterable[int]) -> int:
        """What restore points at these offsets cost together: window rows that they share count once."""
        offsets = sorted(offsets)
        return sum(self._group_bytes(group, offsets) for group in self._groups)

    def _group_bytes(self, group: Group, offsets: Sequence[int]) -> int:
        if group.kind is Kind.RECURRENT:
            return len(offsets) * group.state_bytes
        rows, covered = 0, 0
        for offset in offsets:
            rows += max(0, offset - max(covered, group.first_needed(offset)))
            covered = offset
        return rows * group.bytes_per_token

    def redundant_allowance(self, total: int) -> float:
        """Bytes that redundant restore points may take on a path of `total` tokens."""
        return REDUNDANT_SHARE * total * self.row_bytes if self.is_bounded else float("inf")

    def choose(self, boundaries: Sequence[Boundary], total: int) -> list[Capture]:
        """The captures for a prompt's boundaries, without messages whose points would be over their share at once."""
        captures = [Capture(min(each.offset, total), _REASONS[each.mark]) for each in boundaries]
        allowance = self.redundant_allowance(total)
        chosen = []
        for capture in sorted(captures, key=lambda each: -each.offset):
            if capture.reason is Reason.MESSAGE:
                allowance -= self.point_bytes(capture.offset)
            if allowance >= 0 or capture.reason is not Reason.MESSAGE:
                chosen.append(capture)
        return chosen


class Recorder:
    """Hands what lanes hold to the tree: after each prefill chunk, and when a session ends."""

    def __init__(self, residency: Residency, costs: CaptureCosts, page_tokens: int) -> None:
        self._room = residency.room
        self._evictor = residency.evictor
        self._saver = residency.saver
        self._sharer = residency.sharer
        self._filler = Filler(residency, page_tokens)
        self._costs = costs
        self._page_tokens = page_tokens
        self._groups = residency.memory.groups
        self._full_groups = [group for group in self._groups if group.kind is Kind.FULL]
        self._windows = [group for group in self._groups if group.kind is Kind.WINDOW]

    def record(self, sequence: LiveSequence, end: int, due: Sequence[Capture]) -> None:
        """Bring the tree up to the first `end` tokens of a lane: rows it lacks, the captures that are due, and what it
        knows already and does not have in memory.

        Costs what is new. What does not fit into memory is left out, captures first.
        """
        found = sequence.trie.match(sequence.packed(sequence.pin.offset, end), start=sequence.pin)
        self._room.hold(sequence.trie, sequence.pin, found.node, found.length)
        end, due = self._fit(sequence, end, due)
        self._extend(sequence, end)
        self._attach_captures(sequence, due)
        self._filler.fill(sequence)
        self._saver.save_filled(sequence)
        self._sharer.share_filled(sequence)

    def _fit(self, sequence: LiveSequence, end: int, due: Sequence[Capture]) -> tuple[int, Sequence[Capture]]:
        """Make room for rows and captures. If not all fit, the least worthy captures are given up, then rows.

        In a model that needs restore points, rows without one are of no use: room for one is counted in.
        """
        at, kept = sequence.pin.offset, sorted(due, key=lambda capture: capture.worth)
        while True:
            offsets = {capture.offset for capture in kept} | ({end} if self._costs.needs_points else set())
            if self._make_room(sequence, end, offsets):
                return end, kept
            if not kept or offsets == {end}:
                return self._fit_less(sequence, at, end)
            kept.pop(0)

    def _fit_less(self, sequence: LiveSequence, at: int, end: int) -> tuple[int, Sequence[Capture]]:
        """As many whole pages as fit, with a restore point at their end where one is needed and can still be made."""
        costs = self._costs
        if not costs.row_bytes or any(group.kind is Kind.RECURRENT for group in self._groups):
            return at, []
        shares_rows = sequence.lane.shares_rows
        affordable = self._room.affordable_share if shares_rows else self._room.affordable
        fitting = (affordable(sequence.trie) - costs.point_bytes(end)) // costs.row_bytes
        less = max(at, min(end, at + fitting) // self._page_tokens * self._page_tokens)
        if not less or any(sequence.lane.first_row(group) > group.first_needed(less) for group in self._groups):
            return at, []
        if not self._make_room(sequence, less, {less}):
            return at, []
        return less, [Capture(less, Reason.END)] if costs.needs_points else []

    def _make_room(self, sequence: LiveSequence, end: int, offsets: set[int]) -> bool:
        """Make room for the rows from the pin up to `end`, and for restore points at these offsets."""
        at = sequence.pin.offset
        if not sequence.lane.shares_rows:
            nbytes = (end - at) * self._costs.row_bytes + self._costs.total_bytes(offsets)
            return self._room.make_room(nbytes, spare=sequence.slot, trie=sequence.trie)
        rows = {group: [(at, end)] for group in self._full_groups}
        windows = {group: _window_rows(sequence.lane, group, offsets, end) for group in self._windows}
        new_bytes = self._costs.state_bytes(len(offsets)) + sequence.new_block_bytes(windows)
        share_bytes = new_bytes + sequence.new_block_bytes(rows)
        return self._room.make_room(new_bytes, sequence.slot, sequence.trie, share_bytes)

    def _extend(self, sequence: LiveSequence, end: int) -> None:
        """Add the tokens from the pin up to `end` to the tree, with their rows, and move the pin there."""
        start = sequence.pin.offset
        if start >= end:
            return
        nbytes = 0 if sequence.lane.shares_rows else (end - start) * self._costs.row_bytes
        pages = self._room.retry_after_eviction(
            lambda: self._publish(sequence, start, end), nbytes, sequence.slot
        )  # first: it may fail
        try:
            node = self._place(sequence, start, end)
        except BaseException:
            for page in pages:
                sequence.trie.memory.release(page)
            raise
        for page in pages:
            sequence.trie.add_page(node, page)
        self._room.hold(sequence.trie, sequence.pin, node, end)

    def _place(self, sequence: LiveSequence, start: int, end: int) -> Node:
        """The node whose edge ends with the tokens [start, end): a leaf that grew, or a new child.

        Children that follow a long edge are merged with it when the session ends.
        """
        trie, node, tokens = sequence.trie, sequence.pin.node, sequence.packed(start, end)
        is_long = num_tokens(node.edge) >= LONG_EDGE_TOKENS and start % self._page_tokens == 0
        if start == node.end and node.is_leaf and not node.is_root and not is_long:
            trie.grow(node, tokens)
            return node
        if start < node.end:
            tail, node = node, trie.split(node, start)
            self._evictor.offer(trie, tail)
            self._saver.note_split(trie, tail)
        return trie.append(node, tokens, node.last_used)

    def _publish(self, sequence: LiveSequence, start: int, end: int) -> list[Page]:
        """Pages of all full-attention rows in [start, end); if one fails, those made before it are released."""
        memory, pages = sequence.trie.memory, list[Page]()
        try:
            for group in self._full_groups:
                for page in sequence.publish(group, start, end):
                    pages.append(page)
        except BaseException:
            for page in pages:
                memory.release(page)
            raise
        return pages

    def _attach_captures(self, sequence: LiveSequence, due: Sequence[Capture]) -> None:
        """Make the restore points that are due, where the lane still holds what they need."""
        for capture in due:
            node = _node_at(sequence, capture.offset)
            if self._can_capture(sequence, node, capture.offset):
                states = self._capture_states(sequence, node, capture.offset)
                self._attach(sequence, _node_at(sequence, capture.offset), capture, states)  # it may have been merged

    def _can_capture(self, sequence: LiveSequence, node: Node, offset: int) -> bool:
        if offset > sequence.pin.offset:
            return False
        known = node.points.get(offset)
        for group in self._groups:
            if group.kind is Kind.RECURRENT and not (known and group in known.states) and sequence.lane.offset != offset:
                return False
            if group.kind is Kind.WINDOW and not self._holds_window(sequence, node, group, offset):
                return False
        return True

    def _holds_window(self, sequence: LiveSequence, node: Node, group: Group, offset: int) -> bool:
        """Whether lane and tree together hold the rows that restoring a window group at `offset` needs."""
        start, held_from = group.first_needed(offset), sequence.lane.first_row(group)
        at: Node | None = node
        while held_from > start and at is not None and at.end > start:
            missing = at.missing_between(group, start, offset, self._page_tokens)
            if any(low < held_from for low, _ in missing):
                return False
            at = at.parent
        return True

    def _capture_states(self, sequence: LiveSequence, node: Node, offset: int) -> dict[Group, State]:
        """The states that a restore point at `offset` lacks. First: something may have to be evicted for them."""
        known, states = node.points.get(offset), dict[Group, State]()
        missing = [
            group for group in self._groups if group.kind is Kind.RECURRENT and not (known and group in known.states)
        ]
        try:
            for group in missing:
                capture = partial(sequence.lane.capture, group)
                state = self._room.retry_after_eviction(capture, group.state_bytes, sequence.slot)
                states[group] = sequence.trie.memory.add(state)
        except BaseException:
            for state in states.values():
                sequence.trie.memory.release(state)
            raise
        return states

    def _attach(self, sequence: LiveSequence, node: Node, capture: Capture, states: dict[Group, State]) -> None:
        """Make a restore point with these states and all else that it needs, or none."""
        trie, lane, memory = sequence.trie, sequence.lane, sequence.trie.memory
        is_new = capture.offset not in node.points
        point = trie.add_point(node, capture.offset, capture.reason, kept=capture.kept)
        point.states |= states
        try:
            for group in self._groups:
                if group.kind is Kind.RECURRENT and group not in point.states:  # it was evicted just now
                    point.states[group] = memory.add(lane.capture(group))
                elif group.kind is Kind.WINDOW:
                    trie.hold_window(node, point, group, sequence.publish)
        except BaseException:
            if is_new:
                trie.drop_point(node, point)
            raise
        self._evictor.offer(trie, node)


def _node_at(sequence: LiveSequence, offset: int) -> Node:
    """The node on a sequence's path in whose edge an offset lies."""
    node = sequence.pin.node
    while offset <= node.start:
        assert node.parent is not None
        node = node.parent
    return node


def _window_rows(lane: Lane, group: Group, offsets: Iterable[int], end: int) -> list[Range]:
    """The rows of a window up to `end` that a lane holds and restore points at these offsets need."""
    first = lane.first_row(group)
    return [(max(first, group.first_needed(at)), at) for at in offsets if first < at <= end]
