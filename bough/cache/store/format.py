"""The objects of the store: their format, and reading them with proof.

    8 bytes    magic, with the format's version
    16 bytes   seal: keyed hash of all that follows
    4 bytes    length of the header
    header     group, start, end, number of sections; four lengths, then fingerprint, root, before, tokens;
               for each section: group, start, end, bytes
    payload    the sections' content, one after the other

Three kinds of objects, told apart by the group of their address: the rows of a page, of all groups with full attention;
the list of a page's restore points; and what one restore point needs, states and window rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.cache.disk.errors import DAMAGED, FOREIGN, TRUNCATED, DiskMiss
from bough.cache.disk.keys import HASH_BYTES, Keys
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.state import Buffer, Group, Kind

ROWS, POINTS = -2, -3
"""The groups of addresses of a page's rows and of the list of its restore points; POINT is what one of these needs."""

MAGIC = b"BOUGHOB1"
MAX_OBJECT_BYTES = 2 * 2**30
MAX_LIST_BYTES = 2**20
MAX_SECTIONS = 2**16

_PREFIX = struct.Struct(f"<8s{HASH_BYTES}sI")
_HEADER = struct.Struct("<iqqIIIII")  # group, start, end, number of sections; lengths of the four texts
_SECTION = struct.Struct("<iqqQ")
_POINT = struct.Struct("<qB")


def limit_object_bytes(groups: Sequence[Group], page_tokens: int) -> int:
    """More than any object of a model with these groups has: twice the content of the largest, and room for a header.

    Window rows are sent in the pages that hold them, which may begin before and end after what is needed.
    """
    rows_bytes = sum(group.bytes_per_token * page_tokens for group in groups if group.kind is Kind.FULL)
    point_bytes = sum(
        group.state_bytes + group.bytes_per_token * (group.window + 2 * page_tokens)
        for group in groups
        if group.kind is not Kind.FULL
    )
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
    """What an object holds; `nbytes` is its whole size."""

    sections: tuple[Section, ...]
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def encode(keys: Keys, fingerprint: str, address: Address, sections: Sequence[Section]) -> bytes:
    """A whole object."""
    parts: list[Buffer] = [_encode_header(fingerprint, address, sections)]
    parts += [memoryview(section.data).cast("B") for section in sections]
    return b"".join([_PREFIX.pack(MAGIC, keys.seal(parts), len(parts[0])), *parts])


def _encode_header(fingerprint: str, address: Address, sections: Sequence[Section]) -> bytes:
    texts = (fingerprint.encode(), address.root, address.before, address.tokens)
    numbers = _HEADER.pack(address.group, address.start, address.end, len(sections), *map(len, texts))
    listed = (_SECTION.pack(each.group, each.start, each.end, memoryview(each.data).nbytes) for each in sections)
    return b"".join([numbers, *texts, *listed])


def decode(keys: Keys, fingerprint: str, address: Address, content: Buffer) -> Object:
    """What an object holds, after everything about it was checked; raises DiskMiss. Each section has memory of its own."""
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
    header = bytes(view[_PREFIX.size : _PREFIX.size + header_bytes])
    sections = _read_sections(header, view[_PREFIX.size + header_bytes :])
    if header != _encode_header(fingerprint, address, sections):
        raise DiskMiss(FOREIGN, "it is of another prefix or model")
    return Object(sections, len(view))


def _read_sections(header: bytes, payload: memoryview) -> tuple[Section, ...]:
    _, _, _, count, *lengths = _HEADER.unpack_from(header)
    at, done = _HEADER.size + sum(lengths), 0
    if count > MAX_SECTIONS or at + count * _SECTION.size != len(header):
        raise DiskMiss(DAMAGED, f"its header claims {count} sections")
    sections = []
    for group, start, end, nbytes in _SECTION.iter_unpack(header[at:]):
        sections.append(Section(group, start, end, bytearray(payload[done : done + nbytes])))
        done += nbytes
    if done != len(payload):
        raise DiskMiss(DAMAGED, f"its sections have {done} bytes, and {len(payload)} follow")
    return tuple(sections)


@dataclass(frozen=True, order=True)
class ListedPoint:
    """A restore point in the list of its page. It is told by its offset; its reason may change."""

    offset: int
    reason: int = field(default=0, compare=False)


def list_section(address: Address, points: Sequence[ListedPoint]) -> Section:
    """The one section of a list of restore points."""
    packed = b"".join(_POINT.pack(point.offset, point.reason) for point in sorted(points))
    return Section(POINT, address.start, address.end, packed)


def read_points(address: Address, listed: Object) -> list[ListedPoint]:
    """The restore points that a page's list has; raises DiskMiss if they do not lie in the page."""
    if len(listed.sections) != 1 or len(listed.sections[0].data) % _POINT.size:
        raise DiskMiss(DAMAGED, "it is no list of restore points")
    points = [ListedPoint(*numbers) for numbers in _POINT.iter_unpack(listed.sections[0].data)]
    if not all(address.start < point.offset <= address.end for point in points):
        raise DiskMiss(DAMAGED, "it lists restore points of other pages")
    return points
