"""Archives: what one salt has on a disk, in one file that any other disk can read.

An archive is a plain tar file: `manifest.json` first, then one member for each item, named by its number in the manifest,
that holds the crc32 of the content as four bytes, little-endian, and the content. Members are read as streams and never
extracted, so that an archive cannot write anywhere but into the store.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from zlib import crc32

from bough.cache.admin.manifest import (
    Chain,
    Item,
    Manifest,
    PointItem,
    decode_manifest,
    encode_manifest,
    make_addresses,
)
from bough.cache.admin.members import ArchiveReader, ArchiveWriter, open_archive, write_archive
from bough.cache.disk.disk import Disk
from bough.cache.disk.errors import DiskError, DiskMiss
from bough.cache.disk.ledger import Snapshot
from bough.cache.disk.rows import PointRecord, clamp_time
from bough.cache.graft import ImportedStep, ImportedTree
from bough.cache.steps import RunSteps, Steps, run_at_once
from bough.cache.tree.address import POINT, Address, DiskFile
from bough.cache.tree.tokens import num_tokens
from bough.errors import RequestError, Unavailable

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CRC_BYTES = 4
MAX_MANIFEST_BYTES = 2**26
FLUSH_BYTES = 64 * 2**20
PIECE_BYTES = 2**20  # read and written at a time, with the interpreter's lock released
_NAMED_ITEMS = 20  # damaged ones that are named one by one


@dataclass(frozen=True)
class Exported:
    """How many items were written and the bytes of their content; `num_skipped` could not be read or traced to the root, or
    the disk has no room for them.
    """

    num_items: int
    nbytes: int
    num_skipped: int


@dataclass(frozen=True)
class Imported:
    """How many items are new, how many were not taken (known already, no room, or damaged), and what was wrong."""

    num_items: int
    num_skipped: int
    nbytes: int
    problems: tuple[str, ...]


def export_tree(
    disk: Disk,
    file: Path,
    salt: str = "",
    *,
    run: RunSteps = run_at_once,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Exported:
    """Write what one salt has on a disk now into one file, which is whole or not there; raises DiskError if it cannot be.

    Raises RequestError before anything is written if the tree has prefixes that an archive cannot hold: those of a model
    without full attention, beyond one page. What is queued is waited for. Requests may go on meanwhile: what they drop
    stays on disk until it is read. Files that turn out to be damaged are dropped at the end, where `run` runs what touches
    the tree; if it refuses, they stay until they are found damaged again.
    """
    root = disk.root(salt)
    disk.settle(root)
    with disk.hold(root) as snapshot:
        exporting = _Exporting(disk, root, snapshot)
        exporting.write(file, lambda: is_wanted() and not disk.is_closed)
    if exporting.has_lost:
        try:
            run(exporting.drop_lost)
        except Unavailable as error:
            log.warning("damaged files that an export has found stay for now: %s", error)
    return exporting.finish()


class _Exporting:
    """One export under way: what is to be written, and what became of it."""

    def __init__(self, disk: Disk, root: bytes, snapshot: Snapshot) -> None:
        self._disk = disk
        self._snapshot = snapshot
        addresses = [*(file.address for file in snapshot.files), *(record.address for record in snapshot.points)]
        _require_pages(addresses, disk.page_tokens)
        self._chain = Chain(disk.keys, root, addresses)
        self._traced = [(step, file) for file in snapshot.files if (step := self._chain.find(file.address)) is not None]
        self._num_items = self._nbytes = 0
        self._lost: list[tuple[DiskFile, DiskMiss]] = []
        self._buffer = bytearray(PIECE_BYTES)

    def write(self, file: Path, is_wanted: Callable[[], bool]) -> None:
        with write_archive(file) as archive:
            manifest = self._make_manifest()
            archive.add(MANIFEST, len(manifest), [memoryview(manifest)])
            for number, (_, disk_file) in enumerate(self._traced):
                if not is_wanted():
                    raise DiskError(f"the export to {file} was given up")
                self._write_item(archive, number, disk_file)

    def _make_manifest(self) -> bytes:
        items = [_make_item(self._disk, step, disk_file) for step, disk_file in self._traced]
        found = ((self._chain.find(record.address), record) for record in self._snapshot.points)
        points = [_make_point_item(step, record) for step, record in found if step is not None]
        return encode_manifest(self._disk.identity, self._chain.steps, items, points)

    def _write_item(self, archive: ArchiveWriter, number: int, disk_file: DiskFile) -> None:
        """Write one member, unless its file turns out to be lost: then the archive is as it was."""
        end = archive.end
        try:
            with self._disk.open_payload(disk_file) as payload:
                crc = memoryview(payload.crc.to_bytes(CRC_BYTES, "little"))
                archive.add(str(number), CRC_BYTES + payload.nbytes, chain([crc], payload.pieces(self._buffer)))
        except DiskMiss as miss:
            archive.go_back(end)
            self._lost.append((disk_file, miss))
            return
        self._num_items += 1
        self._nbytes += payload.nbytes

    @property
    def has_lost(self) -> bool:
        return bool(self._lost)

    def drop_lost(self) -> Steps[None]:
        """Drop the files that could not be read, but for those that were cleared meanwhile."""
        for disk_file, miss in self._lost:
            if disk_file.is_saved:
                self._disk.mark_lost(disk_file, miss)
            yield

    def finish(self) -> Exported:
        return Exported(self._num_items, self._nbytes, len(self._snapshot.files) - self._num_items)


def read_manifest(file: Path) -> Manifest:
    """What an archive is of; raises DiskError if it is not an archive."""
    with open_archive(file) as archive:
        return read_first(file, archive)


def _require_same_model(file: Path, manifest: Manifest, disk: Disk) -> None:
    for name in ("fingerprint", "page_tokens"):
        found, wanted = getattr(manifest, name), getattr(disk.identity, name)
        if found != wanted:
            raise DiskError(
                f"{file} is of another model, or of other weights, settings or versions of libraries: its {name} is "
                f"{found!r}, and this tree's is {wanted!r}"
            )


def import_tree(
    disk: Disk, file: Path, salt: str = "", graft: Callable[[ImportedTree], None] = lambda imported: None
) -> Imported:
    """Add what an archive holds to a disk, under this salt, as far as there is room. Any thread may call it.

    What was added is given to `graft`, which takes it up into a tree; else it stays on disk for the next start. If `graft`
    raises before it has begun, what was added is dropped. Raises DiskError if the disk is only read, or the archive of
    another model, fingerprint, format or page size; then nothing was added.
    """
    disk.require_writable()
    importing: _Importing | None = None
    try:
        with open_archive(file) as archive:
            manifest = read_first(file, archive)
            _require_same_model(file, manifest, disk)
            importing = _Importing(disk, salt, manifest)
            importing.take_items(archive)
        importing.take_points()
    finally:
        if importing is not None:  # what was added before a failure stays
            importing.hand_over(graft)
    return importing.finish()


@dataclass
class _Importing:
    """One import under way."""

    disk: Disk
    salt: str
    manifest: Manifest
    files: list[DiskFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_without_room: int = 0
    num_damaged: int = 0

    def __post_init__(self) -> None:
        self._root = self.disk.root(self.salt)
        self._addresses = make_addresses(self.disk.keys, self._root, self.manifest.steps)
        self.steps = [
            ImportedStep(step.parent, step.tokens, address.end)
            for step, address in zip(self.manifest.steps, self._addresses, strict=True)
        ]
        self._now = self.disk.now()  # nothing that is imported was used later than this
        self._missing = set(range(len(self.manifest.items)))

    def take_items(self, archive: ArchiveReader) -> None:
        try:
            while (member := archive.next()) is not None:
                number = int(member.name) if member.name.isdecimal() and len(member.name) < 16 else -1
                if number in self._missing:
                    self._missing.remove(number)
                    self._take(number, archive, member)
        except (tarfile.TarError, EOFError) as error:
            self.problems.append(f"the archive is damaged: {error}")

    def take_points(self) -> None:
        """Note the restore points that this disk does not know yet."""
        for point in self.manifest.points:
            address, used = replace(self._addresses[point.step], group=POINT), clamp_time(point.last_used, self._now)
            record = PointRecord(address, point.reason, point.is_kept, point.is_superseded, used)
            self.disk.put_new_point(record)
            self.steps[point.step].points.append(record)

    def hand_over(self, graft: Callable[[ImportedTree], None]) -> None:
        """Let what was added be taken up. Nothing could ever evict it if it stayed without a user."""
        imported = ImportedTree(self.steps)
        try:
            self.disk.settle(self._root)
            graft(imported)
        except BaseException:
            if imported.claim():
                self.disk.drop_unused(imported.files)
            raise

    def finish(self) -> Imported:
        saved = [disk_file for disk_file in self.files if disk_file.is_saved]
        if len(saved) < len(self.files):
            self.problems.append(f"{len(self.files) - len(saved)} items could not be written")
        if self.num_damaged > _NAMED_ITEMS:
            self.problems.append(f"{self.num_damaged - _NAMED_ITEMS} more items are damaged")
        if self.num_without_room:
            self.problems.append(f"there was no room for {self.num_without_room} items")
        if self._missing:
            self.problems.append(f"{len(self._missing)} items are missing in the archive")
        num_skipped = len(self.manifest.items) - len(saved)
        return Imported(len(saved), num_skipped, sum(disk_file.nbytes for disk_file in saved), tuple(self.problems))

    def _take(self, number: int, archive: ArchiveReader, member: tarfile.TarInfo) -> None:
        item = self.manifest.items[number]
        if not self.disk.has_room(self.disk.file_bytes(item.nbytes, num_tokens(self.manifest.steps[item.step].tokens))):
            self.num_without_room += 1
            return
        content = archive.read(member, item.nbytes + CRC_BYTES)
        payload = memoryview(content)[CRC_BYTES:]
        if len(payload) != item.nbytes or int.from_bytes(content[:CRC_BYTES], "little") != crc32(payload):
            self.num_damaged += 1
            if self.num_damaged <= _NAMED_ITEMS:
                self.problems.append(f"item {number} is damaged")
            return
        self._put(item, payload)

    def _put(self, item: Item, payload: memoryview) -> None:
        address = replace(self._addresses[item.step], group=item.group, start=item.start)
        used = clamp_time(item.last_used, self._now)
        disk_file = self.disk.put(address, lambda: payload, item.nbytes, last_used=used, has_user=False)
        self.steps[item.step].files.append(disk_file)
        if not disk_file.is_saved:  # otherwise this disk has it already
            self.files.append(disk_file)
        if self.disk.pending_bytes >= FLUSH_BYTES:
            self.disk.settle(self._root)


def _require_pages(addresses: Iterable[Address], page_tokens: int) -> None:
    """Raise RequestError if an address has more tokens than a page: no import reads an archive with such a step."""
    longest = max((num_tokens(address.tokens) for address in addresses), default=0)
    if longest > page_tokens:
        raise RequestError(
            "this tree cannot be exported: its model has no layers with full attention, so its states and windows are "
            f"stored under whole prefixes, here of up to {longest:,} tokens, and an archive holds prefixes as pages of "
            f"{page_tokens:,} tokens; machines can share such a tree through a store"
        )


def _make_item(disk: Disk, step: int, disk_file: DiskFile) -> Item:
    address = disk_file.address
    return Item(step, address.group, address.start, address.end, disk.payload_bytes(disk_file), disk_file.last_used)


def _make_point_item(step: int, record: PointRecord) -> PointItem:
    return PointItem(step, record.address.end, record.reason, record.is_kept, record.is_superseded, record.last_used)


def read_first(file: Path, archive: ArchiveReader) -> Manifest:
    """The manifest, which is the first member. Raises ValueError if it is not, or makes no sense."""
    member = archive.next()
    if member is None or member.name != MANIFEST:
        raise ValueError(f"it does not begin with {MANIFEST}")
    if member.size > min(MAX_MANIFEST_BYTES, file.stat().st_size):
        raise ValueError(f"its manifest claims {member.size} bytes")
    return decode_manifest(archive.read(member, member.size))
