"""Archives: the content of one salt on a disk in one file that any other disk can read, and several archives as one.

Items are known by their tokens, so archives of different disks fit together. Only manifests and one item at a time are in
memory.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from bough.cache.admin.archive_format import (
    CRC_BYTES,
    ArchiveReader,
    ArchiveWriter,
    Chain,
    Item,
    Manifest,
    PointItem,
    encode_manifest,
    make_addresses,
    open_archive,
    read_manifest,
    write_archive,
)
from bough.cache.disk.disk import Disk
from bough.cache.disk.errors import DiskError, DiskMiss
from bough.cache.disk.index_rows import clamp_time
from bough.cache.disk.ledger import Snapshot
from bough.cache.graft import NO_STEP, ImportedTree, Step
from bough.cache.steps import RunSteps, Steps, run_at_once
from bough.cache.tree.address import POINT, Address, DiskFile, PointRecord
from bough.errors import RequestError, Unavailable
from bough.tokens import num_tokens

log = logging.getLogger(__name__)

FLUSH_BYTES = 64 * 2**20
_NAMED_ITEMS = 20  # damaged ones that are named one by one


@dataclass(frozen=True)
class ExportResult:
    """The items that were written and the bytes of their content.

    `num_skipped` could not be read or traced to the root, or the disk has no room for them.
    """

    num_items: int
    nbytes: int
    num_skipped: int


@dataclass(frozen=True)
class ImportResult:
    """The items that are new, those that were not taken (known already, no room, or damaged), and the problems."""

    num_items: int
    num_skipped: int
    nbytes: int
    problems: tuple[str, ...]


def export_tree(
    disk: Disk, file: Path, salt: str = "", *, run: RunSteps = run_at_once, is_wanted: Callable[[], bool] = lambda: True
) -> ExportResult:
    """Write what one salt has on a disk now into one file, which is whole or not there; raises DiskError on failure.

    Raises RequestError before anything is written if the tree has prefixes that an archive cannot hold: those of a model
    without full attention, beyond one page. Waits for queued writes. Requests may go on meanwhile: files that they drop
    stay on disk until they are read. Files that turn out to be damaged are dropped at the end, where `run` runs what
    touches the tree; if it refuses, they stay until they are found damaged again.
    """
    root = disk.root(salt)
    disk.settle(root)
    with disk.hold(root) as snapshot:
        exporting = _Exporting(disk, root, snapshot)
        exporting.write(file, lambda: is_wanted() and not disk.is_closed)
    if exporting.lost:
        try:
            run(exporting.drop_lost)
        except Unavailable as error:
            log.warning("damaged files that an export has found stay for now: %s", error)
    num_items = exporting.num_items
    return ExportResult(num_items, exporting.nbytes, len(snapshot.files) - num_items)


class _Exporting:
    """One export under way: the items to write, and those that were written or lost."""

    def __init__(self, disk: Disk, root: bytes, snapshot: Snapshot) -> None:
        self._disk = disk
        self._snapshot = snapshot
        addresses = [*(file.address for file in snapshot.files), *(record.address for record in snapshot.points)]
        _require_pages(addresses, disk.page_tokens)
        self._chain = Chain(disk.keys, root, addresses)
        self._traced = [(step, file) for file in snapshot.files if (step := self._chain.find(file.address)) is not None]
        self.num_items = self.nbytes = 0
        self.lost: list[tuple[DiskFile, DiskMiss]] = []

    def write(self, file: Path, is_wanted: Callable[[], bool]) -> None:
        with write_archive(file, self._encode_manifest(), is_wanted) as archive:
            for number, (_, disk_file) in enumerate(self._traced):
                self._write_item(archive, number, disk_file)

    def _encode_manifest(self) -> bytes:
        items, points = [], []
        for step, file in self._traced:
            nbytes, at = self._disk.payload_bytes(file), file.address
            items.append(Item(step, at.group, at.start, at.end, nbytes, file.last_used))
        for record in self._snapshot.points:
            if (found := self._chain.find(record.address)) is not None:
                end, used = record.address.end, record.last_used
                points.append(PointItem(found, end, record.reason, record.is_kept, record.is_superseded, used))
        model = self._disk.identity
        return encode_manifest(
            Manifest(model.fingerprint, model.model, model.page_tokens, self._chain.steps, items, points)
        )

    def _write_item(self, archive: ArchiveWriter, number: int, disk_file: DiskFile) -> None:
        """Write one member, unless its file turns out to be lost."""
        try:
            payload = self._disk.read(disk_file)
        except DiskMiss as miss:
            self.lost.append((disk_file, miss))
            return
        archive.add(str(number), crc32(payload).to_bytes(CRC_BYTES, "little"), payload)
        self.num_items += 1
        self.nbytes += len(payload)

    def drop_lost(self) -> Steps[None]:
        """Drop the files that could not be read, but for those that were cleared meanwhile."""
        for disk_file, miss in self.lost:
            if disk_file.is_saved:
                self._disk.mark_lost(disk_file, miss)
            yield


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
) -> ImportResult:
    """Add what an archive holds to a disk, under this salt, as far as there is room. Any thread may call it.

    `graft` gets what was added, to take it into a tree; without one it stays on disk for the next start. If `graft` raises
    before it has begun, everything that was added is dropped. Raises DiskError if the disk is only read, or the archive of
    another model, fingerprint, format or page size; then nothing was added.
    """
    disk.require_writable()
    importing: _Importing | None = None
    try:
        with open_archive(file) as archive:
            manifest = archive.read_manifest()
            _require_same_model(file, manifest, disk)
            importing = _Importing(disk, salt, manifest)
            importing.take_items(archive)
        importing.take_points()
    finally:
        if importing is not None:  # files that were added before a failure stay
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
        self._now = self.disk.now()  # no imported item was used later than this
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
            self.manifest.steps[point.step].points.append(record)

    def hand_over(self, graft: Callable[[ImportedTree], None]) -> None:
        """Let `graft` add the new files to the tree. They could never be evicted if they stayed without a user."""
        imported = ImportedTree(self.manifest.steps)
        try:
            self.disk.settle(self._root)
            graft(imported)
        except BaseException:
            if imported.claim():
                self.disk.drop_unused(imported.files)
            raise

    def finish(self) -> ImportResult:
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
        return ImportResult(len(saved), num_skipped, sum(disk_file.nbytes for disk_file in saved), tuple(self.problems))

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
        address = replace(self._addresses[item.step], group=item.group, start=item.start)
        used = clamp_time(item.last_used, self._now)
        disk_file = self.disk.put(address, lambda: payload, item.nbytes, last_used=used, has_user=False)
        self.manifest.steps[item.step].files.append(disk_file)
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


def merge_archives(sources: Sequence[Path], file: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Write everything that these archives hold, each item once, into one file, which is whole or not there.

    Raises DiskError if they are not of the same model, cannot be read or written, or the file is no longer wanted.
    """
    merging = _Merging([read_manifest(source) for source in sources])
    with write_archive(file, merging.encode(), is_wanted) as archive:
        for source, numbers in zip(sources, merging.numbers, strict=True):
            merging.copy(source, numbers, archive)


class _Merging:
    """The manifests as one. `numbers` has for each archive the numbers of its items in the new one."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._first = manifests[0]
        self._steps: list[Step] = []
        self._numbers: dict[tuple[int, bytes], int] = {}  # of the steps, by the parent and the tokens
        self._items: list[Item] = []
        self._known: dict[tuple[int, int, int], int] = {}  # the numbers of items by step, group and start
        self._points: dict[int, PointItem] = {}  # by step
        self._written: set[int] = set()
        self.numbers = [self._add(manifest) for manifest in manifests]

    def _add(self, manifest: Manifest) -> list[int]:
        for name in ("fingerprint", "page_tokens"):
            found, wanted = getattr(manifest, name), getattr(self._first, name)
            if found != wanted:
                raise DiskError(f"these are archives of different models: {name} is {wanted!r} and {found!r}")
        steps = list[int]()
        for step in manifest.steps:
            parent = steps[step.parent] if step.parent != NO_STEP else NO_STEP
            steps.append(self._numbers.setdefault((parent, step.tokens), len(self._steps)))
            if steps[-1] == len(self._steps):
                self._steps.append(replace(step, parent=parent))
        for point in manifest.points:
            self._add_point(replace(point, step=steps[point.step]))
        return [self._add_item(replace(item, step=steps[item.step])) for item in manifest.items]

    def _add_item(self, item: Item) -> int:
        """The number of an item, which is new or known. Its last use is the latest of all archives."""
        number = self._known.setdefault((item.step, item.group, item.start), len(self._items))
        if number == len(self._items):
            self._items.append(item)
        elif item.last_used > self._items[number].last_used:
            self._items[number] = replace(self._items[number], last_used=item.last_used)
        return number

    def _add_point(self, point: PointItem) -> None:
        """A restore point that is kept in one archive is kept."""
        known = self._points.get(point.step, point)
        self._points[point.step] = replace(
            known,
            is_kept=known.is_kept or point.is_kept,
            is_superseded=known.is_superseded and point.is_superseded,
            last_used=max(known.last_used, point.last_used),
        )

    def encode(self) -> bytes:
        points = list(self._points.values())
        return encode_manifest(replace(self._first, steps=self._steps, items=self._items, points=points))

    def copy(self, source: Path, numbers: Sequence[int], archive: ArchiveWriter) -> None:
        """Write the items of one archive that have not been written yet."""
        with open_archive(source) as reader:
            reader.read_manifest()
            while (member := reader.next()) is not None:
                number = numbers[int(member.name)]
                num_bytes = self._items[number].nbytes + CRC_BYTES
                if number not in self._written and (content := reader.read(member, num_bytes)):
                    archive.add(str(number), content)
                    self._written.add(number)
