"""A node of the trie, its restore points, and the pins of busy lanes.

A node owns the tokens [start, end) of one edge. Its pages lie inside that range, sorted, without overlap, and each inside
one page border. A window page is there because restore points need it (`Page.users`); a full page because the edge is.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from bough.cache.tree.address import Address
from bough.cache.tree.state import Group, Kind, Page, State
from bough.cache.tree.tokens import TOKEN_BYTES, num_tokens


class Reason(IntEnum):
    """Why a restore point exists; a larger one is worth more. Trees on disk keep these numbers."""

    MESSAGE = 0  # a message boundary
    LAST_USER = 1  # the start of the last user message
    PROMPT_END = 2  # one token before the end of a prompt
    END = 3  # where a request ended
    BRANCH = 4  # where paths part
    SYSTEM = 5  # the end of system text and tools


@dataclass(frozen=True)
class IndexedPoint:
    """A restore point as the disk's index has it."""

    address: Address
    reason: Reason
    kept: bool
    superseded: bool
    last_used: float = field(default=0.0, compare=False)


@dataclass(eq=False, slots=True)
class Point:
    """An offset at which every group of the model can be restored: `states` holds one state per recurrent group.

    `kept`: it was asked for, and outlives its unkept peers. `superseded`: a later point of this conversation took its role.
    `indexed` is what the disk's index says of it, if it is there.
    """

    offset: int
    reason: Reason
    states: dict[Group, State] = field(default_factory=dict)
    kept: bool = False
    superseded: bool = False
    indexed: IndexedPoint | None = None

    @property
    def is_redundant(self) -> bool:
        """Whether it may be evicted before any row is."""
        if self.kept or self.reason >= Reason.BRANCH:
            return False
        return self.superseded or self.reason is Reason.MESSAGE


@dataclass(eq=False, slots=True)
class Pin:
    """A busy lane's hold on the path up to `offset`: rows below are not evicted.

    While the lane adopts (`is_adopting`), the restore point at `offset` is not evicted either.
    """

    node: Node
    offset: int
    is_adopting: bool = False

    def move(self, node: Node, offset: int) -> None:
        self.node.pins.discard(self)
        self.node, self.offset = node, offset
        node.pins.add(self)


class Node:
    """One edge of the trie and what is held for it. The root has an empty edge and starts at 0."""

    __slots__ = (
        "children",
        "edge",
        "has_holes",
        "hits",
        "key",
        "last_used",
        "number",
        "pages",
        "parent",
        "pins",
        "points",
        "previous_used",
        "stamp",
        "start",
    )

    def __init__(self, parent: Node | None, start: int, edge: bytes, now: float = 0.0) -> None:
        self.parent = parent
        self.start = start
        self.edge = edge
        self.children: dict[int, Node] = {}
        self.pages: dict[Group, list[Page]] = {}
        self.points: dict[int, Point] = {}
        self.pins: set[Pin] = set()
        self.last_used = now
        self.previous_used = float("-inf")
        self.hits = 0
        self.has_holes = False  # a full row is missing, after a load that failed
        self.key = 0  # no other node of the forest has had it; the root has none
        self.number = 0  # siblings with a lower one come first
        self.stamp = 0  # entries of the eviction heap with an older stamp are stale

    @property
    def end(self) -> int:
        return self.start + num_tokens(self.edge)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def first_token(self) -> int:
        return int.from_bytes(self.edge[:TOKEN_BYTES], sys.byteorder, signed=True)

    @property
    def nbytes(self) -> int:
        """Memory that all pages and states of this node occupy, on the device and on the host."""
        return sum(item.nbytes for item in self.items())

    def items(self) -> Iterator[Page | State]:
        """Every page and state of this node, wherever its content lies."""
        for pages in self.pages.values():
            yield from pages
        for point in self.points.values():
            yield from point.states.values()

    @property
    def pinned_to(self) -> int:
        """Rows below this offset are not evicted, because a busy lane stands on them."""
        return max((pin.offset for pin in self.pins), default=self.start)

    def touch(self, now: float) -> None:
        """Count a use at `now`. Two uses at one moment are one for recency."""
        if now != self.last_used:
            self.previous_used, self.last_used = self.last_used, now
        self.hits += 1

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def deepest_point(self, limit: int, *, kept: bool = False) -> int | None:
        """The largest restore point at or below `limit` in this edge; of the kept ones only, if asked."""
        offsets = (at for at, point in self.points.items() if at <= limit and (point.kept or not kept))
        return max(offsets, default=None)

    def pages_between(self, group: Group, start: int, end: int) -> list[Page]:
        """The pages of `group` in this node that hold rows of [start, end), in order; none if that range is empty."""
        if start >= end:
            return []
        pages = self.pages.get(group, [])
        first = bisect_right(pages, start, key=lambda page: page.end)
        last = bisect_left(pages, end, key=lambda page: page.start)
        return pages[first:last]

    def missing_between(self, group: Group, start: int, end: int, page_tokens: int) -> Iterator[tuple[int, int]]:
        """The ranges of [start, end) in this edge for which no page is held, cut at page borders."""
        at = max(start, self.start)
        end = min(end, self.end)
        held = [(page.start, page.end) for page in self.pages_between(group, at, end)]
        for low, high in [*held, (end, end)]:
            while at < min(low, end):
                stop = min(low, end, (at // page_tokens + 1) * page_tokens)
                yield at, stop
                at = stop
            at = max(at, high)


def needs(user: Point | Pin, page: Page) -> bool:
    """Whether restoring at the user's offset needs rows of this window page."""
    assert page.group.kind is Kind.WINDOW
    return page.group.first_needed(user.offset) < page.end and page.start < user.offset
