"""The objects of the store, which archives consist of too: their keys, their format, and reading them with proof.

In a store all our objects are below `bough-state/`, and each key has exactly the form of its kind. A bucket or a folder may
hold other things: what is elsewhere is never listed, and what has another form is neither counted nor deleted. An object is

    8 bytes    magic, with the format's version
    16 bytes   seal: keyed hash of all that follows
    4 bytes    length of the header
    header     group, start, end, number of sections; four lengths, then fingerprint, root, before, tokens;
               for each section: group, start, end, bytes
    payload    the sections' content, one after the other

There are three kinds of objects, distinguished by the group of their address: the rows of a page, of all groups with full
attention; the list of a page's restore points; and what one restore point needs, states and window rows. In an archive rows
may be a part of a page, those of windows are with them, and a restore point has its entry of the list with its states.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from bough.cache.disk.errors import DAMAGED, FOREIGN, TRUNCATED, DiskMiss
from bough.cache.disk.keys import HASH_BYTES, PageKeys
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.state import Buffer, Group, Kind
from bough.tokens import cut, num_tokens

PREFIX = "bough-state/"
LEASE = f"{PREFIX}lease"
DELETED = f"{PREFIX}deleted/"
ALL = "all"

_FINGERPRINT, _HASH, _OWNER = "([0-9a-f]{64})", f"([0-9a-f]{{{2 * HASH_BYTES}}})", "([0-9a-f]{16})"

PAGE_KEY = re.compile(f"{PREFIX}{_FINGERPRINT}/{_HASH}/{_HASH}")
"""Pages, lists and restore points: fingerprint, root, name."""

DELETION_KEY = re.compile(f"{DELETED}{_FINGERPRINT}/(?:{_HASH}|{ALL})/{_OWNER}")
"""Marks of what was cleared: fingerprint, root (none for all of the model), machine."""

ROWS, POINTS = -2, -3
"""The groups in the addresses of a page's rows and of its list of restore points; POINT is that of one restore point."""

MAGIC = b"BOUGHOB1"
MAX_OBJECT_BYTES = 2 * 2**30
MAX_LIST_BYTES = 2**20
MAX_SECTIONS = 2**16

_PREFIX = struct.Struct(f"<8s{HASH_BYTES}sI")
_HEADER = struct.Struct("<iqqIIIII")  # group, start, end, number of sections; lengths of the four texts
_SECTION = struct.Struct("<iqqQ")
_POINT = struct.Struct("<qB")


def limit_object_bytes(groups: Sequence[Group], page_tokens: int) -> int:
    """An upper limit for objects of these groups: twice the content of the largest, and room for a header.

    Window rows are sent in the pages that hold them, which may begin before and end after what is needed.
    """
    rows_bytes = sum(group.bytes_per_token * page_tokens for group in groups if group.kind is Kind.FULL)
    others = [group for group in groups if group.kind is not Kind.FULL]
    point_bytes = sum(each.state_bytes + each.bytes_per_token * (each.window + 2 * page_tokens) for each in others)
    return min(2 * max(rows_bytes, point_bytes) + MAX_LIST_BYTES, MAX_OBJECT_BYTES)


@dataclass(frozen=True)
class Section:
    """Rows [start, end) of a group, or a state (start == end), packed."""

    group: int
    start: int
    end: int
    data: Buffer


@dataclass(frozen=True)
class Object:
    """The address and content of an object; `nbytes` is its whole size."""

    address: Address
    sections: tuple[Section, ...]
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def encode(keys: PageKeys, address: Address, sections: Sequence[Section]) -> bytes:
    parts: list[Buffer] = [_encode_header(keys.fingerprint, address, sections)]
    parts += [memoryview(section.data).cast("B") for section in sections]
    return b"".join([_PREFIX.pack(MAGIC, keys.seal(parts), len(parts[0])), *parts])


def _encode_header(fingerprint: str, address: Address, sections: Sequence[Section]) -> bytes:
    texts = (fingerprint.encode(), address.root, address.before, address.tokens)
    numbers = _HEADER.pack(address.group, address.start, address.end, len(sections), *map(len, texts))
    listed = (_SECTION.pack(each.group, each.start, each.end, memoryview(each.data).nbytes) for each in sections)
    return b"".join([numbers, *texts, *listed])


def decode(keys: PageKeys, address: Address, content: Buffer) -> Object:
    """Verify an object of a known address and return it; raise DiskMiss. Each section has memory of its own."""
    found = read_object(keys, content)
    if found.address != address:
        raise DiskMiss(FOREIGN, "it is of another prefix")
    return found


def read_object(keys: PageKeys, content: Buffer) -> Object:
    """Verify an object, which says itself what it is of, and return it; raise DiskMiss.

    Its sections fill it exactly. Whether its address makes sense is for the caller to check.
    """
    view = memoryview(content).cast("B")
    if len(view) < _PREFIX.size:
        raise DiskMiss(TRUNCATED, f"{len(view)} bytes")
    magic, seal, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise DiskMiss(FOREIGN if magic[:-1] == MAGIC[:-1] else DAMAGED, f"it begins with {magic!r}")
    if len(view) < _PREFIX.size + header_bytes or header_bytes < _HEADER.size:
        raise DiskMiss(TRUNCATED, f"{len(view)} bytes, and its header claims {header_bytes}")
    if keys.seal([view[_PREFIX.size :]]) != seal:
        raise DiskMiss(DAMAGED, "its seal is wrong")
    header, payload = bytes(view[_PREFIX.size :][:header_bytes]), view[_PREFIX.size + header_bytes :]
    group, start, end, num_sections, *lengths = _HEADER.unpack_from(header)
    borders = list(accumulate(lengths, initial=_HEADER.size))
    if num_sections > MAX_SECTIONS or borders[-1] + num_sections * _SECTION.size != len(header):
        raise DiskMiss(DAMAGED, f"its header claims {num_sections} sections")
    fingerprint, root, before, tokens = (header[low:high] for low, high in pairwise(borders))
    if fingerprint != keys.fingerprint.encode():
        raise DiskMiss(FOREIGN, "it is of another model")
    sections = _read_sections(header[borders[-1] :], payload)
    return Object(Address(root, before, tokens, group, start, end), sections, len(view))


def _read_sections(listed: bytes, payload: memoryview) -> tuple[Section, ...]:
    sections, done = [], 0
    for group, start, end, nbytes in _SECTION.iter_unpack(listed):
        sections.append(Section(group, start, end, bytearray(payload[done : done + nbytes])))
        done += nbytes
    if done != len(payload):
        raise DiskMiss(DAMAGED, f"its sections have {done} bytes, and {len(payload)} follow")
    return tuple(sections)


@dataclass(frozen=True, order=True)
class ListedPoint:
    """A restore point in the list of its page, identified by its offset; its reason may change."""

    offset: int
    reason: int = field(default=0, compare=False)


def list_section(address: Address, points: Sequence[ListedPoint]) -> Section:
    """A list of restore points as the one section of its object."""
    packed = b"".join(_POINT.pack(point.offset, point.reason) for point in sorted(points))
    return Section(POINT, address.start, address.end, packed)


def read_points(address: Address, listed: Object) -> list[ListedPoint]:
    """The restore points in a page's list; raise DiskMiss if they are outside the page."""
    if len(listed.sections) != 1:
        raise DiskMiss(DAMAGED, "it is no list of restore points")
    points = unpack_points(listed.sections[0])
    if not all(address.start < point.offset <= address.end for point in points):
        raise DiskMiss(DAMAGED, "it lists restore points of other pages")
    return points


def unpack_points(section: Section) -> list[ListedPoint]:
    """The restore points in a section that `list_section` has made; raise DiskMiss."""
    if len(section.data) % _POINT.size:
        raise DiskMiss(DAMAGED, f"its list of restore points has {len(section.data)} bytes")
    return [ListedPoint(*numbers) for numbers in _POINT.iter_unpack(section.data)]


class StorePath:
    """The addresses of everything on one token prefix below a salt's root. It grows; each page is hashed once."""

    def __init__(self, keys: PageKeys, salt: str) -> None:
        self.root = keys.root(salt)
        self.page_tokens = keys.page_tokens
        self._keys = keys
        self._digests = [keys.first(self.root)]  # element k stands for all tokens before page k
        self._pages: list[bytes] = []
        self._rest = b""

    def add(self, tokens: bytes) -> None:
        """Append these tokens, in O(their number)."""
        tokens, size = self._rest + tokens, self.page_tokens
        whole = num_tokens(tokens) // size * size
        for start in range(0, whole, size):
            page = cut(tokens, start, start + size)
            self._digests.append(self._keys.after(self._digests[-1], page))
            self._pages.append(page)
        self._rest = cut(tokens, whole)

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_tokens + num_tokens(self._rest)

    def rows(self, page: int) -> Address:
        """The rows of a whole page."""
        return self._address(page, ROWS)

    def points(self, page: int) -> Address:
        """The list of a whole page's restore points."""
        return self._address(page, POINTS)

    def _address(self, page: int, group: int) -> Address:
        start = page * self.page_tokens
        return Address(self.root, self._digests[page], self._pages[page], group, start, start + self.page_tokens)

    def point(self, offset: int) -> Address:
        """The content of a restore point inside a whole page, or at its end."""
        page = (offset - 1) // self.page_tokens
        tokens = cut(self._pages[page], 0, offset - page * self.page_tokens)
        return Address(self.root, self._digests[page], tokens, POINT, offset, offset)
