"""The plan: the deepest offset that every group of a model can be restored to, and what a lane then takes from the tree.

Pure functions over intervals. A group can be restored to an offset if an idle lane or the tree holds what that needs;
offset 0 is always possible. Nothing is moved here: plan first, then move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bough.cache.tree.node import Node
from bough.cache.tree.state import Group, Item, Kind, Lane, Page

Interval = tuple[int, int]
"""Offsets [low, high], both included, that a group can be restored to."""


@dataclass(frozen=True)
class LiveRows:
    """An idle lane's part of a prompt: `shared` of its `offset` tokens, and its rows from `first_rows` on."""

    shared: int
    offset: int
    first_rows: Mapping[Group, int]

    @classmethod
    def of(cls, lane: Lane, shared: int, groups: Sequence[Group]) -> LiveRows:
        rows = {group: lane.first_row(group) for group in groups if group.kind is not Kind.RECURRENT}
        return cls(shared, lane.offset, rows)

    @classmethod
    def nothing(cls, groups: Sequence[Group]) -> LiveRows:
        """A lane without anything of the prompt."""
        return cls(0, -1, dict.fromkeys(groups, 0))

    def reach(self, group: Group) -> list[Interval]:
        """The offsets to which this lane can restore one group by itself."""
        if group.kind is Kind.RECURRENT:
            return [(self.offset, self.offset)] if self.shared == self.offset else []
        return _reach_of_rows(group, [(self.first_rows[group], self.shared)])

    def can_stand(self, group: Group, offset: int) -> bool:
        """Whether this lane can restore one group to `offset` by itself."""
        return any(low <= offset <= high for low, high in self.reach(group))


def tree_reach(group: Group, path: Sequence[Node], matched: int) -> list[Interval]:
    """The offsets up to `matched` to which the tree alone can restore one group, along a path."""
    if group.kind is Kind.RECURRENT:
        points = (point for node in path for point in node.points.values())
        return sorted((p.offset, p.offset) for p in points if group in p.states and p.offset <= matched)
    return _reach_of_rows(group, _held_rows(group, path, matched))


def _held_rows(group: Group, path: Sequence[Node], matched: int) -> list[Interval]:
    """The row ranges [a, b) on the path as (a, b), joined where they touch."""
    if group.kind is Kind.FULL and not any(node.has_holes for node in path):
        return [(0, matched)]
    rows: list[Interval] = []
    for node in path:
        for page in node.pages.get(group, ()):
            low, high = page.start, min(page.end, matched)
            if rows and rows[-1][1] == low:
                rows[-1] = (rows[-1][0], high)
            elif low < high:
                rows.append((low, high))
    return rows


def _reach_of_rows(group: Group, rows: Iterable[Interval]) -> list[Interval]:
    """The offsets t whose rows [first_needed(t), t) lie inside one of the given row ranges."""
    if group.kind is Kind.FULL:
        return [(0, high) for low, high in rows if low == 0]
    reach = [(0 if low == 0 else low + group.window - 1, high) for low, high in rows]
    return [(low, high) for low, high in reach if low <= high]


def deepest(reaches: Sequence[Sequence[Interval]], limit: int) -> int:
    """The largest offset ≤ limit in the intervals of every group, or 0."""
    at, before = limit, -1
    while at != before:
        before = at
        for reach in reaches:
            at = max((min(high, at) for low, high in reach if low <= at), default=0)
    return at


def plan(groups: Sequence[Group], path: Sequence[Node], matched: int, live: LiveRows, limit: int) -> int:
    """The deepest offset ≤ limit at which every group can be restored, each from the lane or from the tree.

    Full attention may take its first rows from the lane and the rest from the tree.
    """
    return deepest([_reach(group, path, matched, live) for group in groups], limit)


def _reach(group: Group, path: Sequence[Node], matched: int, live: LiveRows) -> list[Interval]:
    if group.kind is not Kind.FULL:
        return live.reach(group) + tree_reach(group, path, matched)
    at = live.shared
    for low, high in _held_rows(group, path, matched):
        if low <= at:
            at = max(at, high)
    return [(0, at)]


@dataclass(frozen=True)
class NeededItem:
    """An item that restoring at some offset needs from the tree, and the node that holds it."""

    node: Node
    item: Item

    @property
    def start(self) -> int:
        """The deepest offset that a lane can stand at without this item."""
        return self.item.start if isinstance(self.item, Page) else max(0, self.item.offset - 1)


def needed(groups: Sequence[Group], path: Sequence[Node], live: LiveRows, offset: int) -> Iterator[NeededItem]:
    """What a lane takes from the tree to stand at `offset`: states, then window rows, then the rows of full attention."""
    for group in sorted(groups, key=lambda group: -_URGENCY[group.kind]):
        if offset == 0 or (group.kind is not Kind.FULL and live.can_stand(group, offset)):
            continue
        if group.kind is Kind.RECURRENT:
            node = next(node for node in path if offset <= node.end)
            yield NeededItem(node, node.points[offset].states[group])
            continue
        start = live.shared if group.kind is Kind.FULL else group.first_needed(offset)
        for node in path:
            yield from (NeededItem(node, page) for page in node.pages_between(group, start, offset))


_URGENCY = {Kind.FULL: 0, Kind.WINDOW: 1, Kind.RECURRENT: 2}
