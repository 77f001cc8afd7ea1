"""Archives: the content of one salt on a disk as store objects in one tar file, which any other disk can read.

The first member says which model the archive is of. Each other one is an object as in the store (`store.format`), with a
hash of its address as name and its last use as time. The hashes are made without a secret and for the empty salt: nothing
in an archive says whose it was, and an import makes addresses of its own. An object comes after those of the pages before
it, so that one at a time is in memory.
"""

from __future__ import annotations

import tarfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bough.cache.admin.archive_file import ArchiveHead, ArchiveReader, ArchiveWriter, new_archive, open_archive, read_head
from bough.cache.disk import Disk
from bough.cache.disk.errors import DAMAGED, DiskError, DiskMiss
from bough.cache.disk.index_rows import POINT_REASONS, clamp_time, find_problem
from bough.cache.disk.keys import PageKeys
from bough.cache.store.format import (
    ROWS,
    ListedPoint,
    Object,
    Section,
    encode,
    list_section,
    read_object,
    unpack_points,
)
from bough.cache.tree.address import POINT, Address, DiskFile, PageBorder, PointRecord
from bough.tokens import num_tokens

KEPT, SUPERSEDED = 0x40, 0x80
"""Flags beside the reason of a restore point."""

KEPT_SUFFIX = ".kept"
"""Of names of restore points that are kept: merged with another archive's that is not, both stay."""

Attach = Callable[[Sequence[DiskFile], Sequence[PointRecord]], None]
"""Adds files and restore points that are on disk to a tree, and drops those that it does not need."""

PASSES = 4
"""How often an export looks for files that requests have put in place of others meanwhile."""

FLUSH_BYTES = 64 * 2**20
_NAMED_OBJECTS = 20  # damaged ones that are named one by one


@dataclass(frozen=True)
class ExportResult:
    """The pages and states that were written, and the bytes of their content.

    `num_skipped` could not be read or traced to the root, or the disk has no room for them.
    """

    num_items: int
    nbytes: int
    num_skipped: int


@dataclass(frozen=True)
class ImportResult:
    """The pages and states that are new, those that were not (known already, no room, damaged), and the problems."""

    num_items: int
    num_skipped: int
    nbytes: int
    problems: tuple[str, ...]


class Chain:
    """Translates the addresses below one root to other keys and another root. The pages of a prefix come first."""

    def __init__(self, source: PageKeys, root: bytes, target: PageKeys, new_root: bytes) -> None:
        self._source, self._target, self._new_root = source, target, new_root
        self._borders = {source.first(root): PageBorder(0, target.first(new_root))}

    def translate(self, address: Address) -> Address | None:
        """The address under the other keys; None if the page before it is not there, or ends elsewhere."""
        border = self._borders.get(address.before)
        if border is None or border.offset + num_tokens(address.tokens) != address.end:
            return None
        return replace(address, root=self._new_root, before=border.digest)

    def add(self, address: Address) -> None:
        """Rows are there at this address, which has been translated: if they are a page's, what follows may come."""
        if address.group == ROWS and num_tokens(address.tokens) == self._source.page_tokens:
            digest = self._target.after(self._borders[address.before].digest, address.tokens)
            self._borders[self._source.after(address.before, address.tokens)] = PageBorder(address.end, digest)


def export_tree(disk: Disk, file: Path, salt: str = "", is_wanted: Callable[[], bool] = lambda: True) -> ExportResult:
    """Write what one salt has on a disk into one file, which is whole or not there; raises DiskError on failure.

    Waits for queued writes, and changes nothing: damaged files are left out. Requests may go on meanwhile: files that they
    put in place of others are looked for again, and what is evicted before it is read is left out too.
    """
    exporting = _Exporting(disk, disk.root(salt))
    with new_archive(file, ArchiveHead.of(disk), lambda: is_wanted() and not disk.is_closed) as archive:
        for _ in range(PASSES):
            if not exporting.write_new(archive):
                break
    return ExportResult(len(exporting.written), exporting.nbytes, exporting.num_skipped)


class _Exporting:
    """One export under way: the files that were written, their bytes, and how many others there were at the last look."""

    def __init__(self, disk: Disk, root: bytes) -> None:
        self._disk, self._root = disk, root
        self._keys = ArchiveHead.of(disk).keys
        self._chain = Chain(disk.keys, root, self._keys, self._keys.root(""))
        self._done = set[Address]()
        self.written = set[DiskFile]()
        self.nbytes = self.num_skipped = 0

    def write_new(self, archive: ArchiveWriter) -> bool:
        """Write what there is now and was not written yet, pages before what follows them; False if there was nothing."""
        self._disk.settle(self._root)
        files, num_done = defaultdict[Address, list[DiskFile]](list), len(self._done)
        for file in self._disk.files():
            if (at := file.address).root == self._root:
                files[replace(at, group=ROWS if at.start < at.end else POINT)].append(file)
        points = {each.address: each for each in self._disk.points() if each.address.root == self._root}
        new = (address for address in dict.fromkeys([*files, *points]) if address not in self._done)
        for address in sorted(new, key=lambda address: (address.end - 1) // self._disk.page_tokens):
            if (translated := self._chain.translate(address)) is not None:
                self._write_object(archive, address, translated, files.get(address, ()), points.get(address))
        self.num_skipped = sum(file not in self.written for each in files.values() for file in each)
        return len(self._done) > num_done

    def _write_object(
        self,
        archive: ArchiveWriter,
        address: Address,
        translated: Address,
        files: Sequence[DiskFile],
        record: PointRecord | None,
    ) -> None:
        """Write one object, unless none of its files can be read: then nothing that follows it is written."""
        sections = [section for file in files if (section := self._read(file)) is not None]
        name, times = self._keys.name(translated).hex(), [file.last_used for file in files]
        if record is not None:
            reason = record.reason | record.is_kept * KEPT | record.is_superseded * SUPERSEDED
            sections.append(list_section(translated, [ListedPoint(address.end, reason)]))
            name, times = name + record.is_kept * KEPT_SUFFIX, [*times, record.last_used]
        if sections:
            archive.add(name, encode(self._keys, translated, sections), max(times))
            self._chain.add(address)
            self._done.add(address)

    def _read(self, file: DiskFile) -> Section | None:
        """A file as a section of its object; None if it is damaged, or was dropped meanwhile."""
        try:
            payload = self._disk.read(file)
        except DiskMiss:
            return None
        self.written.add(file)
        self.nbytes += len(payload)
        return Section(file.address.group, file.address.start, file.address.end, payload)


def merge_archives(sources: Sequence[Path], file: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Write the objects of several archives, each once, into one file, which is whole or not there; raises DiskError."""
    head, written = read_head(sources[0]), set[str]()
    with new_archive(file, head, is_wanted) as merged:
        for source in sources:
            with open_archive(source) as archive:
                if not archive.head.is_like(head):
                    raise DiskError(f"these are archives of different models: {head} and {archive.head}")
                while (member := archive.next()) is not None:
                    if member.name not in written:
                        written.add(member.name)
                        merged.add(member.name, archive.read(member), member.mtime)


def import_tree(disk: Disk, file: Path, salt: str = "", attach: Attach = lambda files, points: None) -> ImportResult:
    """Add what an archive holds to a disk, under this salt, as far as there is room. Any thread may call it.

    `attach` adds it to a tree; without one it stays on disk for the next start. If `attach` raises, what the tree does not
    use is dropped. Raises DiskError if the disk is only read, or the archive of another model, fingerprint, format or page
    size; then nothing was added.
    """
    disk.require_writable()
    importing: _Importing | None = None
    try:
        with open_archive(file) as archive:
            if not archive.head.is_like(head := ArchiveHead.of(disk)):
                raise DiskError(
                    f"{file} is of another model, or of other weights, settings or versions of libraries: it is of "
                    f"{archive.head}, and this tree of {head}"
                )
            importing = _Importing(disk, salt, archive.head.keys)
            importing.take_objects(archive)
    finally:
        if importing is not None:  # files that were added before a failure stay
            importing.hand_over(attach)
    return importing.finish()


@dataclass
class _Importing:
    """One import under way. `found` has all files, also those that the disk had before; `fresh` is without these."""

    disk: Disk
    salt: str
    keys: PageKeys
    found: list[DiskFile] = field(default_factory=list)
    fresh: list[DiskFile] = field(default_factory=list)
    points: dict[Address, PointRecord] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_damaged: int = 0
    num_unreached: int = 0
    num_without_room: int = 0

    def __post_init__(self) -> None:
        self._root = self.disk.root(self.salt)
        self._chain = Chain(self.keys, self.keys.root(""), self.disk.keys, self._root)
        self._now = self.disk.now()  # no imported item was used later than this

    def take_objects(self, archive: ArchiveReader) -> None:
        try:
            while (member := archive.next()) is not None:
                try:
                    self._take(read_object(self.keys, archive.read(member)), clamp_time(member.mtime, self._now))
                except DiskMiss as miss:
                    self.num_damaged += 1
                    if self.num_damaged <= _NAMED_OBJECTS:
                        self.problems.append(f"the object {member.name[:40]!r} is damaged: {miss.detail}")
        except (tarfile.TarError, EOFError) as error:
            self.problems.append(f"the archive is damaged: {error}")

    def _take(self, found: Object, last_used: float) -> None:
        """Put the sections of an object on disk, and note its restore point. Raise DiskMiss if it makes no sense."""
        _require_sense(found, self.keys)
        address = self._chain.translate(found.address)
        if address is None:
            self.num_unreached += 1
            return
        self._chain.add(found.address)
        for section in found.sections:
            if section.group == POINT:
                self._take_point(replace(address, group=POINT), section, last_used)
            else:
                self._take_file(replace(address, group=section.group), section, last_used)

    def _take_point(self, address: Address, section: Section, last_used: float) -> None:
        """Note a restore point. An archive of several trees may have it more than once: it is kept if one of them does."""
        flags = unpack_points(section)[0].reason
        is_kept = bool(flags & KEPT) or (address in self.points and self.points[address].is_kept)
        reason = flags & ~(KEPT | SUPERSEDED)
        self.points[address] = PointRecord(address, reason, is_kept, bool(flags & SUPERSEDED), last_used)

    def _take_file(self, address: Address, section: Section, last_used: float) -> None:
        nbytes = len(section.data)
        if not self.disk.has_room(self.disk.file_bytes(nbytes, num_tokens(address.tokens))):
            self.num_without_room += 1
            return
        disk_file = self.disk.put(address, lambda: section.data, nbytes, last_used=last_used, has_user=False)
        self.found.append(disk_file)
        if not disk_file.is_saved:  # otherwise this disk has it already
            self.fresh.append(disk_file)
        if self.disk.pending_bytes >= FLUSH_BYTES:
            self.disk.settle(self._root)

    def hand_over(self, attach: Attach) -> None:
        """Let the tree use what was added. Files without a user could never be evicted."""
        points = [record for record in self.points.values() if self.disk.put_new_point(record)]
        self.disk.settle(self._root)
        try:
            attach(self.found, points)
        except BaseException:
            self.disk.drop_unused(self.found)
            raise

    def finish(self) -> ImportResult:
        saved = [disk_file for disk_file in self.fresh if disk_file.is_saved]
        num_failed = len(self.fresh) - len(saved)
        for number, problem in (
            (num_failed, "{:,} items could not be written"),
            (self.num_damaged - _NAMED_OBJECTS, "{:,} more objects are damaged"),
            (self.num_without_room, "there was no room for {:,} items"),
            (self.num_unreached, "{:,} objects have no place: pages before them are missing or damaged"),
        ):
            if number > 0:
                self.problems.append(problem.format(number))
        num_skipped = len(self.found) - len(saved) + self.num_without_room + self.num_damaged + self.num_unreached
        return ImportResult(len(saved), num_skipped, sum(file.nbytes for file in saved), tuple(self.problems))


def _require_sense(found: Object, keys: PageKeys) -> None:
    """Raise DiskMiss if an object is not of the form that an export writes: anybody can make its seal."""
    address = found.address
    is_point = address.group == POINT and address.start == address.end
    if not is_point and (address.group != ROWS or address.start >= address.end):
        raise DiskMiss(DAMAGED, f"it is no rows and no restore point, but group {address.group}")
    if num_tokens(address.tokens) > keys.page_tokens and address.before != keys.first(address.root):
        raise DiskMiss(DAMAGED, f"it has {num_tokens(address.tokens)} tokens after a page")
    for section in found.sections:
        span = section.start, section.end
        if is_point and section.group == POINT:
            problem = "" if _are_points(section, address.end) else "its restore point makes no sense"
        else:
            problem = find_problem(replace(address, group=section.group), len(section.data), keys.page_tokens)
        if span != (address.start, address.end) or problem:
            raise DiskMiss(DAMAGED, problem or f"it has rows [{section.start}, {section.end})")


def _are_points(section: Section, offset: int) -> bool:
    points = unpack_points(section)
    return [each.offset for each in points] == [offset] and points[0].reason & ~(KEPT | SUPERSEDED) in POINT_REASONS


def measure_archive(file: Path) -> ExportResult:
    """Read an archive and return what it has; raises DiskError if it is not whole."""
    num_items = nbytes = 0
    with open_archive(file) as archive:
        while (member := archive.next()) is not None:
            found = read_object(archive.head.keys, archive.read(member))
            sizes = [len(section.data) for section in found.sections if section.group >= 0]
            num_items, nbytes = num_items + len(sizes), nbytes + sum(sizes)
    return ExportResult(num_items, nbytes, num_skipped=0)
