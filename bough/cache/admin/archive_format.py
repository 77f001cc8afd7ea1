"""The format of an archive: a plain tar file, written one member after another, and read with every claim checked.

`manifest.json` comes first, then one member for each item, named by its number in the manifest, that holds the crc32 of the
content as four bytes, little-endian, and the content. Members are read as streams and never extracted, so that an archive
cannot write anywhere but into the store.

The manifest says which model the archive is of, and the tokens of every item. Tokens are kept as steps. A step is one page
of tokens, or part of one, after another step that is a whole page: together they are the prefix of an item, from which any
disk can make an address under its own secret and salt. There is no salt, secret or keyed hash in a manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from bough.cache.disk import page_files
from bough.cache.disk.errors import DiskError
from bough.cache.disk.folder import translate_errors
from bough.cache.disk.index_rows import MAX_CONTENT_BYTES, MAX_GROUP, MAX_PAGE_TOKENS, POINT_REASONS, are_tokens, is_time
from bough.cache.disk.keys import PageKeys
from bough.cache.graft import NO_STEP, Step
from bough.cache.tree.address import Address
from bough.cache.tree.state import Buffer
from bough.tokens import num_tokens

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**26
CRC_BYTES = 4
ARCHIVE_FORMAT = 1

_LONGEST_TEXT = 1_000
_LEAST_VALUES, _VALUE_BYTES = 16, 20  # no object of a manifest is written in fewer bytes than these


@dataclass(frozen=True)
class Item:
    """A page or state: rows [start, end) of the tokens that its step ends, and the size of its content."""

    step: int
    group: int
    start: int
    end: int
    nbytes: int
    last_used: float


@dataclass(frozen=True)
class PointItem:
    """A restore point at the end of its step."""

    step: int
    end: int
    reason: int
    is_kept: bool
    is_superseded: bool
    last_used: float


@dataclass(frozen=True)
class Manifest:
    """All of a manifest; `decode_manifest` has checked that its parts fit together."""

    fingerprint: str
    model: str
    page_tokens: int
    steps: Sequence[Step]
    items: Sequence[Item]
    points: Sequence[PointItem]


class Chain:
    """The steps of addresses: each page of tokens once, after the page before it."""

    def __init__(self, keys: PageKeys, root: bytes, addresses: Iterable[Address]) -> None:
        self.steps: list[Step] = []
        self._of: dict[tuple[bytes, bytes], int] = {}
        after = {keys.first(root): NO_STEP}
        for address in sorted(addresses, key=lambda address: address.end):
            where = (address.before, address.tokens)
            if where in self._of or address.before not in after:
                continue
            self._of[where] = len(self.steps)
            if num_tokens(address.tokens) == keys.page_tokens:
                after[keys.after(*where)] = len(self.steps)
            self.steps.append(Step(after[address.before], address.tokens, address.end))

    def find(self, address: Address) -> int | None:
        """The step of an address, or None if some page before it is not known."""
        return self._of.get((address.before, address.tokens))


def make_addresses(keys: PageKeys, root: bytes, steps: Sequence[Step]) -> list[Address]:
    """For each step the address of its end, under these keys and this root; the caller fills in group and start."""
    addresses: list[Address] = []
    first = keys.first(root)
    for step in steps:
        parent = addresses[step.parent] if step.parent != NO_STEP else None
        before = keys.after(parent.before, parent.tokens) if parent else first
        addresses.append(Address(root, before, step.tokens, 0, step.end, step.end))
    return addresses


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON. It is made piece by piece: one long call of `json` would hold the interpreter's lock."""
    head = {
        "format": ARCHIVE_FORMAT,
        "byte_order": sys.byteorder,
        "fingerprint": manifest.fingerprint,
        "model": manifest.model,
        "page_tokens": manifest.page_tokens,
    }
    lists: dict[str, Iterable[dict[str, Any]]] = {
        "steps": ({"parent": step.parent, "tokens": b64encode(step.tokens).decode()} for step in manifest.steps),
        "items": map(vars, manifest.items),
        "points": map(vars, manifest.points),
    }
    pieces = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    pieces += [f"{json.dumps(name)}: [{', '.join(map(json.dumps, objects))}]" for name, objects in lists.items()]
    return f"{{{', '.join(pieces)}}}".encode()


def decode_manifest(content: bytes) -> Manifest:
    """A manifest from JSON, checked as a whole. Raises ValueError that names the first field that makes no sense."""
    num_values = content.count(b"{") + content.count(b"[")
    if num_values > _LEAST_VALUES + len(content) // _VALUE_BYTES:
        raise ValueError(f"its manifest has {num_values:,} objects and lists in {len(content):,} bytes: too many")
    try:
        return _decode(json.loads(content))
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its manifest cannot be read: {error!r:.200}") from error


def _decode(data: Any) -> Manifest:
    if (data["format"], data["byte_order"]) != (ARCHIVE_FORMAT, sys.byteorder):
        raise ValueError(f"it has format {data['format']!r:.40}, {data['byte_order']!r:.40}-endian")
    head = _Fields("", data)
    page_tokens = head.whole("page_tokens", 1, MAX_PAGE_TOKENS)
    steps = _decode_steps(data["steps"], page_tokens)
    return Manifest(
        fingerprint=head.text("fingerprint"),
        model=head.text("model"),
        page_tokens=page_tokens,
        steps=steps,
        items=_decode_items(data["items"], steps),
        points=_decode_points(data["points"], steps),
    )


def _decode_steps(data: Any, page_tokens: int) -> list[Step]:
    steps: list[Step] = []
    for index, each in enumerate(_objects("steps", data, ["parent", "tokens"])):
        parent, tokens = each.whole("parent", NO_STEP, index - 1), b64decode(each.data["tokens"], validate=True)
        if not are_tokens(tokens) or num_tokens(tokens) > page_tokens:
            raise ValueError(f"{each.where}tokens are not 1 to {page_tokens} token ids of 4 bytes")
        if parent != NO_STEP and num_tokens(steps[parent].tokens) != page_tokens:
            raise ValueError(f"{each.where}parent is {parent}, and that step is no whole page")
        start = steps[parent].end if parent != NO_STEP else 0
        steps.append(Step(parent, tokens, start + num_tokens(tokens)))
    return steps


def _decode_items(data: Any, steps: Sequence[Step]) -> list[Item]:
    items: dict[tuple[int, int, int], Item] = {}
    for index, each in enumerate(_objects("items", data, _names(Item))):
        number = each.whole("step", 0, len(steps) - 1)
        step = steps[number]
        item = Item(
            step=number,
            end=each.whole("end", step.end, step.end),
            group=each.whole("group", 0, MAX_GROUP - 1),
            start=each.whole("start", step.start, step.end),
            nbytes=each.whole("nbytes", 0, MAX_CONTENT_BYTES),
            last_used=each.moment("last_used"),
        )
        if items.setdefault((item.step, item.group, item.start), item) is not item:
            raise ValueError(f"items[{index}] is there twice")
    return list(items.values())


def _decode_points(data: Any, steps: Sequence[Step]) -> list[PointItem]:
    points: list[PointItem] = []
    for each in _objects("points", data, _names(PointItem)):
        number = each.whole("step", 0, len(steps) - 1)
        point = PointItem(
            step=number,
            end=each.whole("end", steps[number].end, steps[number].end),
            reason=each.whole("reason", min(POINT_REASONS), max(POINT_REASONS)),
            is_kept=each.flag("is_kept"),
            is_superseded=each.flag("is_superseded"),
            last_used=each.moment("last_used"),
        )
        points.append(point)
    return points


def _names(kind: type[Item] | type[PointItem]) -> list[str]:
    return [field.name for field in fields(kind)]


def _objects(name: str, data: Any, wanted: Sequence[str]) -> Iterator[_Fields]:
    """The objects of a list; raises ValueError if one has other fields than these."""
    if type(data) is not list:
        raise ValueError(f"{name} is a {type(data).__name__}, and must be a list")
    for index, each in enumerate(data):
        if type(each) is not dict or each.keys() != set(wanted):
            raise ValueError(f"{name}[{index}] must have the fields {', '.join(wanted)}, and no others")
        yield _Fields(f"{name}[{index}].", each)


@dataclass(frozen=True)
class _Fields:
    """One object of a manifest, and its place there. Each field is checked when it is read; raises ValueError."""

    where: str
    data: dict[str, Any]

    def whole(self, name: str, low: int, high: int) -> int:
        value = self.data[name]
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(name, f"a whole number from {low} to {high}")
        return value

    def moment(self, name: str) -> float:
        if not is_time(self.data[name]):
            raise self._refuse(name, "a finite number of seconds")
        return float(self.data[name])

    def flag(self, name: str) -> bool:
        value = self.data[name]
        if type(value) is not bool:
            raise self._refuse(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.data[name]
        if type(value) is not str or len(value) > _LONGEST_TEXT or not value.isprintable():
            raise self._refuse(name, f"a printable text of at most {_LONGEST_TEXT} characters")
        return value

    def _refuse(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"{self.where}{name} is {self.data[name]!r:.40}, and must be {wanted}")


class ArchiveWriter:
    """Writes the members of an archive one after another."""

    def __init__(self, file: Path, descriptor: int, is_wanted: Callable[[], bool]) -> None:
        self._file, self._descriptor, self._is_wanted = file, descriptor, is_wanted
        self._end = 0

    def add(self, name: str, *parts: Buffer) -> None:
        """Add a member. Raises DiskError if the archive is no longer wanted."""
        if not self._is_wanted():
            raise DiskError(f"the export to {self._file} was given up")
        member = tarfile.TarInfo(name)
        member.size, member.mode = sum(map(len, parts)), 0o600
        self._write(member.tobuf(tarfile.GNU_FORMAT), *parts)
        self._write(bytes(-self._end % tarfile.BLOCKSIZE))

    def finish(self) -> None:
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self._end % tarfile.RECORDSIZE))

    def _write(self, *parts: Buffer) -> None:
        page_files.write_all(self._descriptor, [memoryview(part) for part in parts])
        self._end += sum(map(len, parts))


@contextlib.contextmanager
def write_archive(file: Path, manifest: bytes, is_wanted: Callable[[], bool]) -> Iterator[ArchiveWriter]:
    """A new archive with this manifest, to which items are added; it gets its name when all is written."""
    with translate_errors(file):
        with page_files.new_file(file, file.with_name(f".{file.name}.tmp")) as descriptor:
            archive = ArchiveWriter(file, descriptor, is_wanted)
            archive.add(MANIFEST, manifest)
            yield archive
            archive.finish()
        page_files.sync_folder(file.parent)


class ArchiveReader:
    """The members of an archive, one after another: plain files alone, and every claim of a header is checked.

    The standard library's reader takes long names and other extensions into memory, however long they claim to be.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._next = 0

    def next(self) -> tarfile.TarInfo | None:
        """The next member, or None at the end. Raises TarError if it is not of the kind that we write."""
        self._stream.seek(self._next)
        block = self._stream.read(tarfile.BLOCKSIZE)
        if not block.strip(b"\0"):
            return None
        member = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise tarfile.ReadError(f"{member.name!r} is no plain file")
        if self._next + tarfile.BLOCKSIZE + member.size > self._size:
            raise tarfile.ReadError(f"{member.name!r} claims {member.size:,} bytes, more than there are")
        self._next += tarfile.BLOCKSIZE + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return member

    def read(self, member: tarfile.TarInfo, num_bytes: int) -> bytes:
        """The content of the member that came last, if it has this size; nothing if it has another."""
        return self._stream.read(num_bytes) if member.size == num_bytes else b""

    def read_manifest(self) -> Manifest:
        """The manifest, which is the first member. Raises ValueError if it is not, or makes no sense."""
        member = self.next()
        if member is None or member.name != MANIFEST:
            raise ValueError(f"it does not begin with {MANIFEST}")
        if member.size > min(MAX_MANIFEST_BYTES, self._size):
            raise ValueError(f"its manifest claims {member.size} bytes")
        return decode_manifest(self.read(member, member.size))


@contextlib.contextmanager
def open_archive(file: Path) -> Iterator[ArchiveReader]:
    with translate_errors(file):
        try:
            with file.open("rb") as stream:
                yield ArchiveReader(stream)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise DiskError(f"{file} is not an archive of a tree: {error}") from error


def read_manifest(file: Path) -> Manifest:
    """The manifest of an archive; raises DiskError if the file is not an archive."""
    with open_archive(file) as archive:
        return archive.read_manifest()
