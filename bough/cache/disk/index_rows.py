"""Rows of the index, each checked as it is read.

An invalid row is dropped alone, whatever wrote it: an older version, an editor, a failing disk. The name of a row is a
keyed hash of its address: a row whose name does not match its other columns was not written by us.
"""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.cache.disk.keys import HASH_BYTES, PageKeys
from bough.cache.tree.address import POINT, Address, DiskFile, PointRecord
from bough.cache.tree.node import Reason
from bough.cache.tree.state import Group, Kind
from bough.tokens import TOKEN_BYTES

POINT_REASONS = frozenset(map(int, Reason))

MAX_CONTENT_BYTES = 2**30  # of a page or state
MAX_PAGE_TOKENS = 2**16
MAX_OFFSET = 2**40
MAX_GROUP = 2**15
MAX_HITS = 2**40

_MAX_FILE_BYTES = MAX_CONTENT_BYTES + 2**24  # with its header
_SIGN_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


@dataclass(frozen=True)
class BadRow:
    """An invalid row, by its table and row id, and what is wrong with it."""

    table: str
    row_id: int
    problem: str

    def __str__(self) -> str:
        return f"row {self.row_id} of {self.table}: {self.problem}"


@dataclass
class IndexContent:
    """Everything in an index, by name, and the rows that failed the check."""

    files: dict[bytes, DiskFile] = field(default_factory=dict)
    points: dict[bytes, PointRecord] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)


def read_content(connection: sqlite3.Connection, keys: PageKeys, now: float) -> IndexContent:
    """Everything in an index; times after `now` become `now`. Raise sqlite3.Error if it cannot be read."""
    content, last_used = IndexContent(), dict[int, float]()
    hits = _read_hits(connection, content)
    for row_id, used in connection.execute("SELECT id, last_used FROM uses"):
        if is_time(used):
            last_used[row_id] = clamp_time(used, now)
        else:
            content.bad_rows.append(BadRow("uses", row_id, f"last_used is {_shown(used)}"))
    _read_copies(connection, keys, last_used, hits, content)
    _read_points(connection, keys, now, content)
    return content


def _read_hits(connection: sqlite3.Connection, content: IndexContent) -> dict[int, int]:
    """How often each file was used. An index of an earlier version that is only read has no such table."""
    hits = dict[int, int]()
    if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'hits'").fetchone()[0]:
        return hits
    for row_id, number in connection.execute("SELECT id, hits FROM hits"):
        if type(number) is int and 0 < number <= MAX_HITS:
            hits[row_id] = number
        else:
            content.bad_rows.append(BadRow("hits", row_id, f"hits is {_shown(number)}"))
    return hits


def encode_groups(groups: Sequence[Group]) -> str:
    """The groups of a model as text for the index, "" for none."""
    rows = [[each.index, each.kind.value, each.bytes_per_token, each.state_bytes, each.window] for each in groups]
    return json.dumps(rows) if rows else ""


def decode_groups(text: str) -> list[Group]:
    try:
        return [Group(_count(index), Kind(kind), *map(_count, sizes)) for index, kind, *sizes in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return []


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{_shown(value)} is not a count")
    return value


def are_tokens(tokens: bytes) -> bool:
    """Whether these are packed tokens: at least one, none of them negative."""
    return len(tokens) > 0 and len(tokens) % TOKEN_BYTES == 0 and tokens[_SIGN_BYTE::TOKEN_BYTES].isascii()


def is_time(value: Any) -> bool:
    """Whether a value is a moment: a finite number of seconds."""
    return type(value) in (int, float) and math.isfinite(value)


def clamp_time(value: float, now: float) -> float:
    """A moment limited to [0, now]: clocks jump."""
    return min(max(0.0, float(value)), now)


def _read_copies(
    connection: sqlite3.Connection,
    keys: PageKeys,
    last_used: dict[int, float],
    hits: dict[int, int],
    content: IndexContent,
) -> None:
    roots: dict[bytes, bytes] = {}  # so that all addresses of a root share one object
    query = "SELECT id, name, root, before, tokens, group_index, start_offset, end_offset, nbytes FROM copies"
    for row_id, name, root, before, tokens, group, start, end, nbytes in connection.execute(query):
        problem = _find_problem(root, before, tokens, start, end)
        if not problem:
            address = Address(roots.setdefault(root, root), before, tokens, group, start, end)
            problem = _find_file_problem(address, nbytes, keys.page_tokens) or _find_name_problem(name, address, keys)
        if problem:
            content.bad_rows.append(BadRow("copies", row_id, problem))
        else:
            used = last_used.get(row_id, 0.0)
            content.files[name] = DiskFile(name, address, nbytes, used, hits.get(row_id, 1), is_saved=True, num_users=0)


def _read_points(connection: sqlite3.Connection, keys: PageKeys, now: float, content: IndexContent) -> None:
    query = "SELECT rowid, name, root, before, tokens, end_offset, reason, is_kept, is_superseded, last_used FROM points"
    for row_id, name, root, before, tokens, end, *values in connection.execute(query):
        problem = _find_problem(root, before, tokens, end, end) or _find_point_problem(*values)
        if not problem:
            address = Address(root, before, tokens, POINT, end, end)
            problem = _find_name_problem(name, address, keys)
        if problem:
            content.bad_rows.append(BadRow("points", row_id, problem))
        else:
            reason, is_kept, is_superseded, last_used = values
            record = PointRecord(address, reason, bool(is_kept), bool(is_superseded), clamp_time(last_used, now))
            content.points[name] = record


def find_problem(address: Address, nbytes: int, page_tokens: int) -> str:
    """The first problem of a file's address and size, which may come from anywhere; "" if there is none."""
    problem = _find_problem(address.root, address.before, address.tokens, address.start, address.end)
    return problem or _find_file_problem(address, nbytes, page_tokens)


def _find_problem(root: Any, before: Any, tokens: Any, start: Any, end: Any) -> str:
    """The first problem in the columns that files and points share; "" if there is none."""
    for name, value in (("root", root), ("before", before)):
        if type(value) is not bytes or len(value) != HASH_BYTES:
            return f"{name} is {_shown(value)}"
    if type(tokens) is not bytes or not are_tokens(tokens):
        return f"tokens are {_shown(tokens)}"
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= MAX_OFFSET:
        return f"its rows are [{_shown(start)}, {_shown(end)})"
    return "" if end * TOKEN_BYTES >= len(tokens) else f"it ends at {end}, before all of its tokens"


def _find_file_problem(address: Address, nbytes: Any, page_tokens: int) -> str:
    if type(address.group) is not int or not 0 <= address.group < MAX_GROUP:
        return f"group_index is {_shown(address.group)}"
    if address.start < address.end and address.start // page_tokens != (address.end - 1) // page_tokens:
        return f"its rows [{address.start}, {address.end}) cross a border of pages of {page_tokens} tokens"
    if type(nbytes) is not int or not 0 < nbytes <= _MAX_FILE_BYTES:
        return f"nbytes is {_shown(nbytes)}"
    return ""


def _find_point_problem(reason: Any, is_kept: Any, is_superseded: Any, last_used: Any) -> str:
    if type(reason) is not int or reason not in POINT_REASONS:
        return f"reason is {_shown(reason)}"
    for name, value in (("is_kept", is_kept), ("is_superseded", is_superseded)):
        if type(value) is not int or value not in (0, 1):
            return f"{name} is {_shown(value)}"
    return "" if is_time(last_used) else f"last_used is {_shown(last_used)}"


def _find_name_problem(name: Any, address: Address, keys: PageKeys) -> str:
    return "" if keys.name(address) == name else f"its name is {_shown(name)}, and not the one of its address"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
