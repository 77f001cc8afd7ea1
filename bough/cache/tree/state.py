"""Groups, pages, states and lanes: the contract between the tree and the engines.

The cache core never looks inside `Page.rows` or `State.data`; an engine never looks at the tree. All offsets count tokens
from the start of the sequence, and all ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from bough.cache.tree.address import DiskFile

PAGE_TOKENS = 256

Range = tuple[int, int]
"""Tokens [start, end), counted from the root."""

Buffer = bytes | bytearray | memoryview
"""The content of a page or state as it is written to disk and read back."""


def page_ranges(start: int, end: int, page_tokens: int) -> list[Range]:
    """[start, end) cut at page borders."""
    if start >= end:
        return []
    borders = range((start // page_tokens + 1) * page_tokens, end, page_tokens)
    return list(pairwise([start, *borders, end]))


class Tier(IntEnum):
    """Where the content of a page or state is, the fastest first. On a CPU, device and host are one tier: DEVICE.

    No item of the tree is in the store, which machines share: what is found there is copied to another tier.
    """

    DEVICE = 0
    HOST = 1
    DISK = 2
    STORE = 3


class Kind(Enum):
    """How the state of a group depends on the sequence."""

    FULL = "full"  # one row a token, all rows are needed
    WINDOW = "window"  # one row a token, only the last W - 1 are needed to go on
    RECURRENT = "recurrent"  # one state, whole, for each offset


@dataclass(frozen=True)
class Group:
    """The layers of a model whose state has one kind and shape.

    `bytes_per_token` is for rows (full and window), `state_bytes` for a recurrent state, each over all layers of the group.
    """

    index: int
    kind: Kind
    bytes_per_token: int = 0
    state_bytes: int = 0
    window: int = 0

    def first_needed(self, offset: int) -> int:
        """The first row needed to go on from `offset`: rows [first_needed, offset) restore this group."""
        if self.kind is Kind.FULL:
            return 0
        if self.kind is Kind.WINDOW:
            return max(0, offset - self.window + 1)
        return offset

    def needed_bytes(self, offset: int) -> int:
        if self.kind is Kind.RECURRENT:
            return self.state_bytes
        return (offset - self.first_needed(offset)) * self.bytes_per_token


@dataclass(eq=False)
class Block:
    """Device memory with consecutive rows of a sequence, which pages and lanes share.

    Its bytes count once: for the tree, if a page of the tree is in it, else for the first of the lanes.
    """

    nbytes: int


@dataclass(eq=False, slots=True)
class Page:
    """The rows [start, end) of one group, all its layers; never across a page border.

    `rows` is the engine's, None on disk; `nbytes` is the memory that it takes in its tier. Where lanes and pages share
    memory, `block` is its block on the device, which is counted instead of `nbytes`. `users` are the restore points and
    holds that need a window page. `files` are the files on disk that hold rows of it, each with the range of these rows:
    beyond it a file may hold rows of another branch.
    """

    group: Group
    start: int
    end: int
    rows: Any
    nbytes: int
    users: set[Any] = field(default_factory=set)
    tier: Tier = Tier.DEVICE
    files: dict[DiskFile, Range] = field(default_factory=dict)
    block: Block | None = None

    @property
    def span(self) -> Range:
        return self.start, self.end

    @property
    def content_bytes(self) -> int:
        """The bytes to move, in any tier."""
        return (self.end - self.start) * self.group.bytes_per_token


@dataclass(eq=False, slots=True)
class State:
    """The whole state of one recurrent group at one offset. `data` is the engine's, None on disk; else as Page."""

    group: Group
    offset: int
    data: Any
    nbytes: int
    tier: Tier = Tier.DEVICE
    files: dict[DiskFile, Range] = field(default_factory=dict)

    @property
    def span(self) -> Range:
        return self.offset, self.offset

    @property
    def content_bytes(self) -> int:
        return self.group.state_bytes


Item = Page | State


@dataclass(frozen=True)
class GroupSource:
    """Where a lane takes one group from when it adopts an offset t.

    full       rows [0, live) stay as they are, `pages` cover [live, t); the first may begin before `live`
    window     either live > 0 and no pages: the lane's own rows reach t; or `pages` cover [first_needed(t), t),
               and the first may begin before that
    recurrent  either live == t and no state: the lane's own state is at t; or `state` is the one at t
    At t = 0 a source is empty: the group starts anew.
    """

    live: int = 0
    pages: tuple[Page, ...] = ()
    state: State | None = None


@dataclass(frozen=True)
class Incoming:
    """The rows that a lane is about to adopt at `offset`.

    `copied` are the rows of each group that come from tiers below the device, in order: they need memory of the lane's own.
    All other rows the lane has already, or takes from pages on the device.
    """

    offset: int
    copied: Mapping[Group, Sequence[Range]] = field(default_factory=dict)


class RowSpan(NamedTuple):
    """Rows [start, end) of a lane that can be published as one page, and their block, if any."""

    start: int
    end: int
    block: Block | None


class Lane(Protocol):
    """One live sequence on the device. The engine decides how it holds its rows.

    All groups of a lane are at one offset between calls. After an engine fails in a forward pass they may differ, and then
    only `adopt` from offset 0 or `clear` is allowed, or `adopt` on a lane of full attention alone.
    """

    @property
    def offset(self) -> int:
        """Tokens evaluated or adopted so far."""

    @property
    def nbytes(self) -> int:
        """Device memory that this lane occupies, or that is reserved for it, without blocks that pages use."""

    @property
    def own_bytes(self) -> int:
        """The part of `nbytes` outside of blocks: what is reserved and not used yet, and what it never shares."""

    @property
    def shares_rows(self) -> bool:
        """Whether `adopt` and `publish` pass blocks by reference instead of copying rows.

        Publishing rows of full attention then costs no memory. A block with rows of a window costs its bytes the first
        time: the lane needs another one when it goes on.
        """

    def blocks(self) -> Iterable[Block]:
        """The blocks with rows of this lane; none if it does not share rows."""

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """`nbytes` after `reserve(num_tokens, incoming)`; never less than now."""

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """`nbytes` after `clear()` and `reserve(num_tokens, incoming)`."""

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """The most that this lane occupies during `reserve(num_tokens, incoming)`, its present memory included."""

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        """Make room for rows [0, num_tokens), keeping live ones.

        `incoming` is what the lane will adopt next; without it, it goes on from its offset. Lanes that copy rows make room
        for all of them.
        """

    def drop_reserve(self) -> None:
        """Release the reserved memory that can be released without moving a row: the lane becomes idle."""

    def first_row(self, group: Group) -> int:
        """The first row of a group that this lane still holds; it holds [first_row, offset).

        After an evaluation of [a, b), a window group still holds [first_needed(a), b), until the next one.
        """

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        """Go to `offset`, taking each group from its source, after room was reserved.

        Pages and states may be on the device or on the host, and stay there.
        """

    def spans(self, group: Group, start: int, end: int) -> list[RowSpan]:
        """Rows [start, end) of this lane within a page border, cut between blocks, so that each span can be published."""

    def publish(self, group: Group, start: int, end: int) -> Page:
        """A new page with rows [start, end) of this lane, which are within one of its `spans`."""

    def capture(self, group: Group) -> State:
        """A new state of this recurrent group at the present offset."""

    def clear(self) -> None:
        """Go back to offset 0 and release all memory."""


class PageStore(Protocol):
    """Pages and states outside of lanes. A call that fails raises EngineError and leaves the given pages as they are."""

    @property
    def groups(self) -> Sequence[Group]:
        """Every group of the model, in a fixed order."""

    def device_bytes(self, item: Page | State) -> int:
        """The memory of an item on the device: for rows in blocks, a whole block."""

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        """Rows [start, at) and [at, end) as two new pages, in one block or each in its own memory; consumes the page."""

    def can_join(self, left: Page, right: Page) -> bool:
        """Whether neighbours in one tier can become one page: not if they are in different blocks."""

    def join(self, left: Page, right: Page) -> Page:
        """Rows [a, b) and [b, c) as one new page [a, c); consumes both pages."""

    def release(self, item: Page | State) -> None:
        """Release the memory. Each page and state is consumed or released exactly once."""


class ContentStore(PageStore, Protocol):
    """A page store that also moves content between tiers and packs it as plain bytes."""

    @property
    def has_host(self) -> bool:
        """Whether device and host memory are separate: only then is there a host tier."""

    def pack(self, item: Page | State) -> Buffer | None:
        """The content as plain bytes that do not change; None if the item has no content any more.

        Any thread may call this, at any time; the other methods are for the engine's thread.
        """

    def packed_bytes(self, item: Page | State) -> int:
        """The number of bytes that `pack` returns."""

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        """A new page in a tier from packed bytes. Raise ValueError, with the numbers, if the size does not fit.

        The engine takes ownership of `data` and may keep it instead of copying it.
        """

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        """A new state in a tier from packed bytes; as `unpack_page`."""

    def to_host(self, item: Page | State) -> None:
        """Move the content to the host tier, in place, without waiting for the copy.

        Raise EngineError or MemoryError if there is no memory for it; the item then stays as it was.
        """

    def to_device(self, item: Page | State) -> None:
        """Move the content to the device, in place; as `to_host`."""

    def host_bytes(self) -> int:
        """Host memory that is allocated for pages and states, in use or not."""

    def host_seconds_per_byte(self) -> float | None:
        """The recent time per byte from the host to a lane; None before the first."""
