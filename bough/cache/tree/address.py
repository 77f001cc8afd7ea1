"""Addresses of pages, states and restore points outside this process, and what is stored under them."""

from __future__ import annotations

from dataclasses import dataclass, field

POINT = -1
"""The group in the address of a restore point itself, which has no content."""


@dataclass(frozen=True)
class Address:
    """The position of a page, a state or a restore point in a tree.

    `root` stands for the salt. `before` is the digest of all tokens up to the last page border below `end`, `tokens` are
    the packed tokens from that border up to `end`: together they name the whole prefix. A page holds rows [start, end); a
    state and a restore point have start == end, their offset.
    """

    root: bytes
    before: bytes
    tokens: bytes
    group: int
    start: int
    end: int


@dataclass(frozen=True)
class PageBorder:
    """A page border on some path, and the digest of all tokens before it."""

    offset: int
    digest: bytes


@dataclass(frozen=True)
class PointRecord:
    """A restore point as the disk's index has it; `reason` is a `Reason`."""

    address: Address
    reason: int
    is_kept: bool
    is_superseded: bool
    last_used: float


@dataclass(eq=False, slots=True)
class DiskFile:
    """A file on disk, or one that is queued to be written. Pages that were cut from one page share its file.

    `is_saved` turns True when file and index are safely written, `has_failed` when they could not be; both are set by the
    writer. `name` is a hash of the address, `nbytes` the size of the file. `hits` are the uses of the
    deepest node with content in it. `num_users` counts the pages and states that
    refer to it.
    """

    name: bytes
    address: Address
    nbytes: int
    last_used: float = 0.0
    hits: int = 1
    is_saved: bool = False
    has_failed: bool = False
    num_users: int = field(default=1)
