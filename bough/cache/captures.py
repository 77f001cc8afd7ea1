"""Captures: which restore points a request makes on its way, and what they cost.

Models of full attention alone need none. Elsewhere: where the prompt leaves the tree, the end of system and tools, the
start of the last user message, the end of every message that can be afforded, one token before the prompt's end, the end,
and every so often on the way through a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bough.cache.tree.reason import Reason
from bough.cache.tree.state import Group, Kind
from bough.types import Boundary, Mark

POINT_SPACING = 16_384
"""A long prompt gets a restore point at every multiple of this, for those that part from it in between."""

REDUNDANT_SHARE = 0.2
"""Redundant restore points may take this share of their path's row bytes; what is beyond goes at once."""

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


class CaptureCosts:
    """What rows and restore points of one model cost, and how much redundant ones may take."""

    def __init__(self, groups: Sequence[Group], is_bounded: bool) -> None:
        self._groups = [group for group in groups if group.kind is not Kind.FULL]
        self.is_bounded = is_bounded  # without a budget, redundant points may take what they like
        self.row_bytes = sum(group.bytes_per_token for group in groups if group.kind is Kind.FULL)
        self.needs_points = bool(self._groups)

    def point_bytes(self, offset: int) -> int:
        """What a restore point at `offset` costs at the most, beside the rows of full attention."""
        return sum(group.needed_bytes(offset) for group in self._groups)

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
