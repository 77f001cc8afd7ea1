"""What a node holds and what an engine's lane can do: the nouns between the tree and the engines.

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
"""Plain bytes: the content of a page or state as it is written to disk and read back."""


def page_ranges(start: int, end: int, page_tokens: int) -> list[Range]:
    """[start, end) cut at page borders; nothing if it is empty."""
    if start >= end:
        return []
    borders = range((start // page_tokens + 1) * page_tokens, end, page_tokens)
    return list(pairwise([start, *borders, end]))


class Tier(IntEnum):
    """Where the content of a page or state lies, the fastest first. On a CPU, device and host are one tier: DEVICE.

    No item of the tree lies in the store, which machines share: what is found there is brought to one of the others.
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
        """The first row that a lane standing at `offset` still needs: rows [first_needed, offset) restore this group."""
        if self.kind is Kind.FULL:
            return 0
        if self.kind is Kind.WINDOW:
            return max(0, offset - self.window + 1)
        return offset

    def needed_bytes(self, offset: int) -> int:
        """Bytes of what restores this group at `offset`."""
        if self.kind is Kind.RECURRENT:
            return self.state_bytes
        return (offset - self.first_needed(offset)) * self.bytes_per_token


@dataclass(eq=False)
class Block:
    """Device memory in which rows lie that follow each other in a sequence, for pages and lanes together.

    Whoever uses it, its bytes count once: for the tree, if a page of the tree lies in it, else for the first of the lanes.
    """

    nbytes: int


@dataclass(eq=False, slots=True)
class Page:
    """The rows [start, end) of one group, all its layers; never across a page border.

    `rows` belongs to the engine, None on disk; `nbytes` is the memory that it takes in its tier. Where lanes and pages
    share memory, `block` is the one that it lies in on the device, which is counted instead of `nbytes`; else it has memory
    of its own. `users` are the restore points and pins that need a window page. `files` are the files on disk that hold
    rows of it, each with the range for which that is so: a file may hold rows of another branch beyond it.
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
        """The rows [start, end)."""
        return self.start, self.end

    @property
    def content_bytes(self) -> int:
        """How much there is to move, wherever it lies."""
        return (self.end - self.start) * self.group.bytes_per_token


@dataclass(eq=False, slots=True)
class State:
    """The whole state of one recurrent group at one offset. `data` is the engine's, None on disk; the rest as in a page."""

    group: Group
    offset: int
    data: Any
    nbytes: int
    tier: Tier = Tier.DEVICE
    files: dict[DiskFile, Range] = field(default_factory=dict)

    @property
    def span(self) -> Range:
        """The offset, twice."""
        return self.offset, self.offset

    @property
    def content_bytes(self) -> int:
        """How much there is to move, wherever it lies."""
        return self.group.state_bytes


Item = Page | State


@dataclass(frozen=True)
class Source:
    """Where a lane takes one group from when it adopts an offset t.

    full       rows [0, live) stay as they are, `pages` cover [live, t); the first may begin before `live`
    window     either live > 0 and no pages: the lane's own rows reach t; or `pages` cover [first_needed(t), t),
               and the first may begin before that
    recurrent  either live == t and no state: the lane's own state stands at t; or `state` is the one at t
    At t = 0 a source is empty: the group starts anew.
    """

    live: int = 0
    pages: tuple[Page, ...] = ()
    state: State | None = None


@dataclass(frozen=True)
class Incoming:
    """What a lane is about to adopt: it will stand at `offset`.

    `copied` are the rows of each group that pages below the device hold, in their order: they need memory of the lane's
    own. All other rows it has already, or takes from pages on the device.
    """

    offset: int
    copied: Mapping[Group, Sequence[Range]] = field(default_factory=dict)


class Span(NamedTuple):
    """Rows [start, end) of a lane that can be published as one page, and the block that they lie in, if any."""

    start: int
    end: int
    block: Block | None


class Lane(Protocol):
    """One live sequence on the device. How it holds its rows is the engine's business.

    All groups of a lane stand at one offset between calls; an engine that fails in the middle of a forward pass may leave
    them apart, and then only `adopt` from offset 0 or `clear` is allowed, or `adopt` on a lane of full attention alone.
    """

    @property
    def offset(self) -> int:
        """Tokens evaluated or adopted so far."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory that this lane occupies now, or that was reserved for it; without blocks that pages lie in."""
        ...

    @property
    def own_bytes(self) -> int:
        """The part of `nbytes` that lies in no block: what was reserved and is not used yet, and what it never shares."""
        ...

    @property
    def shares_rows(self) -> bool:
        """Whether `adopt` and `publish` pass blocks by reference instead of copying rows.

        Publishing rows of full attention then costs no memory. A block with rows of a window costs its bytes, the first
        time: the lane needs another one in its place when it goes on.
        """
        ...

    def blocks(self) -> Iterable[Block]:
        """The blocks that this lane holds rows in; none if it does not share rows."""
        ...

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """What `nbytes` will be after `reserve(num_tokens, incoming)`. Never less than now."""
        ...

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """What `nbytes` will be after `clear()` and `reserve(num_tokens, incoming)`."""
        ...

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """The most that this lane occupies while `reserve(num_tokens, incoming)` runs, its present memory included."""
        ...

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        """Make room for rows [0, num_tokens), keeping live ones.

        `incoming` is what the lane will adopt next; without it, it goes on from where it stands. Lanes that copy rows make
        room for all of them.
        """
        ...

    def drop_reserve(self) -> None:
        """Give back what was reserved and can be given back without moving a row: the lane is idle from now on."""
        ...

    def first_row(self, group: Group) -> int:
        """The lowest row of a row group that this lane still holds; it holds [first_row, offset).

        After an evaluation of [a, b), a window group still holds [first_needed(a), b), until the next one.
        """
        ...

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        """Stand at `offset`, taking each group from its source. There is one source for each group, room is reserved.

        Pages and states may lie on the device or on the host; they stay where they are.
        """
        ...

    def spans(self, group: Group, start: int, end: int) -> list[Span]:
        """Rows [start, end) within a page border, which this lane holds, as they can be published: cut between blocks."""
        ...

    def publish(self, group: Group, start: int, end: int) -> Page:
        """A new page with rows [start, end), which this lane holds and which lie within one of its `spans`."""
        ...

    def capture(self, group: Group) -> State:
        """A new state: this recurrent group as it is now, at `offset`."""
        ...

    def clear(self) -> None:
        """Go back to offset 0 and give all memory back."""
        ...


class PageStore(Protocol):
    """What an engine does with pages and states that have left their lane.

    A call that fails raises EngineError and leaves the given pages as they are.
    """

    @property
    def groups(self) -> Sequence[Group]:
        """Every group of the model, in a fixed order; a model may have none of a kind."""
        ...

    def device_bytes(self, item: Page | State) -> int:
        """Device memory that the content of an item would take there: for rows in blocks, a whole block."""
        ...

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        """Rows [start, at) and [at, end) as two new pages, in one block or each in its own memory. The page is consumed."""
        ...

    def can_join(self, left: Page, right: Page) -> bool:
        """Whether neighbours in one tier can become one page: not if they lie in different blocks."""
        ...

    def join(self, left: Page, right: Page) -> Page:
        """Rows [a, b) and [b, c) as one new page [a, c). Both given pages are consumed."""
        ...

    def release(self, item: Page | State) -> None:
        """Give the memory back. Each page and state is consumed or released exactly once."""
        ...


class ContentStore(PageStore, Protocol):
    """A page store that can also move content between tiers and turn it into plain bytes."""

    @property
    def has_host(self) -> bool:
        """Whether the device's memory is apart from the host's: only then is there a host tier."""
        ...

    def pack(self, item: Page | State) -> Buffer | None:
        """The content as plain bytes, from memory that does not change; None if the item has no content any more.

        The one call that another thread may make at any time.
        """
        ...

    def packed_bytes(self, item: Page | State) -> int:
        """How many bytes `pack` gives."""
        ...

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        """A new page in a tier from what `pack` gave. Raises ValueError, with the numbers, if the size does not fit.

        `data` is the engine's from now on: it may keep it instead of copying it.
        """
        ...

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        """A new state in a tier from what `pack` gave; as `unpack_page`."""
        ...

    def to_host(self, item: Page | State) -> None:
        """Move the content to host memory, in place, without waiting for the copy. Only where there is a host tier.

        Raises EngineError or MemoryError if there is no memory for it; the item is then as it was.
        """
        ...

    def to_device(self, item: Page | State) -> None:
        """Move the content back to the device, in place; as `to_host`."""
        ...

    def host_bytes(self) -> int:
        """Host memory that was taken for pages and states, whether they use it just now or not."""
        ...

    def host_seconds_per_byte(self) -> float | None:
        """What bringing a byte from the host to a lane took lately; None if nothing was brought yet."""
        ...
