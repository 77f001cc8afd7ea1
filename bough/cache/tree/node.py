"""A node of the trie, its restore points, and the holds of busy lanes.

A node owns the tokens [start, end) of one edge. Its pages are inside that range, sorted, without overlap, and each inside
one page border. A page of full attention exists as long as its part of the edge, a window page as long as restore points
or holds need it (`Page.users`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from bough.cache.tree.address import PointRecord
from bough.cache.tree.state import Group, Kind, Page, State
from bough.tokens import TOKEN_BYTES, num_tokens


class Reason(IntEnum):
    """Why a restore point exists; a larger one is worth more. Trees on disk keep these numbers."""

    MESSAGE = 0  # a message boundary
    LAST_USER = 1  # the start of the last user message
    PROMPT_END = 2  # one token before the end of a prompt
    END = 3  # where a request ended
    BRANCH = 4  # where paths part
    SYSTEM = 5  # the end of system text and tools


@dataclass(eq=False, slots=True)
class Point:
    """An offset at which every group of the model can be restored: `states` holds one state per recurrent group.

    `kept`: a client asked for it, and it outlives its unkept peers. `superseded`: a later point of this conversation took
    its role. `indexed` is its record in the disk's index, if any.
    """

    offset: int
    reason: Reason
    states: dict[Group, State] = field(default_factory=dict)
    kept: bool = False
    superseded: bool = False
    indexed: PointRecord | None = None

    @property
    def is_redundant(self) -> bool:
        """Whether it may be evicted before any row is."""
        if self.kept or self.reason >= Reason.BRANCH:
            return False
        return self.superseded or self.reason is Reason.MESSAGE


@dataclass(eq=False, slots=True)
class Hold:
    """A busy lane's hold on the path up to `offset`: rows below are not evicted.

    While the lane adopts (`is_adopting`), neither is the restore point at `offset`.
    """

    node: Node
    offset: int
    is_adopting: bool = False

    def move(self, node: Node, offset: int) -> None:
        self.node.holds.discard(self)
        self.node, self.offset = node, offset
        node.holds.add(self)


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """One edge of the trie and what is held for it. The root has an empty edge and starts at 0.

    Three numbers tell nodes apart. The `key` is the node's name for people and programs: no other node of the forest ever
    has it, and the root has none. The `number` orders siblings in views, the oldest first; a head that is split off, and a
    node that merges with its parent, take over the other's. The `stamp` counts how often the node was offered to eviction:
    entries of the order with an older stamp are stale.
    """

    parent: Node | None
    start: int
    edge: bytes
    last_used: float = 0.0
    previous_used: float = float("-inf")
    hits: int = 0
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    pages: dict[Group, list[Page]] = field(default_factory=dict)
    points: dict[int, Point] = field(default_factory=dict)  # by offset
    holds: set[Hold] = field(default_factory=set)
    has_holes: bool = False  # a row of full attention is missing, after a load that failed
    key: int = 0
    number: int = 0
    stamp: int = 0

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
        """The memory of all pages and states of this node, on the device and on the host."""
        return sum(item.nbytes for item in self.items())

    def items(self) -> Iterator[Page | State]:
        for pages in self.pages.values():
            yield from pages
        for point in self.points.values():
            yield from point.states.values()

    @property
    def held_here_to(self) -> int:
        """Rows below this offset are not evicted: a busy lane uses them."""
        return max((hold.offset for hold in self.holds), default=self.start)

    def touch(self, now: float) -> None:
        """Count a use at `now`. Two uses at one moment are one for recency."""
        if now != self.last_used:
            self.previous_used, self.last_used = self.last_used, now
        self.hits += 1

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes, node = list[Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def at(self, offset: int) -> Node:
        """The node on the path down to this one whose edge (start, end] contains an offset."""
        node = self
        while offset <= node.start:
            assert node.parent is not None
            node = node.parent
        return node

    def upwards(self, start: int) -> Iterator[Node]:
        """This node and its ancestors, as far up as they have tokens after `start`; never the root."""
        node = self
        while node.parent is not None and node.end > start:
            yield node
            node = node.parent

    def path_tokens(self) -> bytes:
        """The packed tokens from the root to the end of this node."""
        return b"".join(node.edge for node in self.path())

    def deepest_point(self, limit: int, *, kept: bool = False) -> int | None:
        """The largest restore point at or below `limit` in this edge, or the largest kept one."""
        offsets = (at for at, point in self.points.items() if at <= limit and (point.kept or not kept))
        return max(offsets, default=None)

    def pages_between(self, group: Group, start: int, end: int) -> list[Page]:
        """The pages of `group` in this node that hold rows of [start, end), in order."""
        if start >= end:
            return []
        pages = self.pages.get(group, [])
        first = bisect_right(pages, start, key=lambda page: page.end)
        last = bisect_left(pages, end, key=lambda page: page.start)
        return pages[first:last]

    def missing_between(self, group: Group, start: int, end: int, page_tokens: int) -> Iterator[tuple[int, int]]:
        """The ranges of [start, end) in this edge without a page, cut at page borders."""
        at = max(start, self.start)
        end = min(end, self.end)
        held = [(page.start, page.end) for page in self.pages_between(group, at, end)]
        for low, high in [*held, (end, end)]:
            while at < min(low, end):
                stop = min(low, end, (at // page_tokens + 1) * page_tokens)
                yield at, stop
                at = stop
            at = max(at, high)

    def missing_on_path(self, group: Group, start: int, end: int, page_tokens: int) -> Iterator[tuple[int, int]]:
        """The ranges of [start, end) that no page on the path down to this node holds, the deepest node's first."""
        for node in self.upwards(start):
            yield from node.missing_between(group, start, end, page_tokens)


def needs(user: Point | Hold, page: Page) -> bool:
    """Whether restoring at the user's offset needs rows of this window page."""
    assert page.group.kind is Kind.WINDOW
    return page.group.first_needed(user.offset) < page.end and page.start < user.offset
