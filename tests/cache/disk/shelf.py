"""A disk to try things on: pages of four tokens whose content tells where it belongs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cache.disk import Disk
from bough.cache.tree.address import POINT, Address, DiskFile, PointRecord
from bough.tokens import cut, pack
from tests.waiting import BOUND_S

PAGE = 4
CONTENT_BYTES = 1000


@dataclass
class Shelf:
    """Opens disks on one folder, collects their warnings, and makes addresses and content."""

    folder: Path
    warnings: list[str] = field(default_factory=list)

    def open(self, **changes: Any) -> Disk:
        settings: dict[str, Any] = {
            "fingerprint": "fingerprint-1",
            "page_tokens": PAGE,
            "budget_bytes": 2**30,
            "floor_bytes": 0,
            "warn": self.warnings.append,
        }
        return Disk(self.folder, **(settings | changes))

    def page_files(self) -> list[Path]:
        return sorted(file for file in (self.folder / "pages").rglob("*") if file.is_file())

    def page_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.page_files())


def address_of(disk: Disk, tokens: Sequence[int], start: int, *, group: int = 0, salt: str = "") -> Address:
    """The address of the rows [start, len(tokens)) after these tokens."""
    packed, end = pack(tokens), len(tokens)
    page = (end - 1) // PAGE
    root = disk.root(salt)
    return Address(root, disk.digests(root, packed)[page], cut(packed, page * PAGE, end), group, start, end)


def point_of(disk: Disk, tokens: Sequence[int], salt: str = "") -> Address:
    return address_of(disk, tokens, len(tokens), group=POINT, salt=salt)


def content_of(address: Address, num_bytes: int = CONTENT_BYTES) -> bytes:
    """Bytes that no other address has."""
    seed = repr((address.tokens, address.group, address.start, address.end)).encode()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def put(disk: Disk, address: Address, *, last_used: float = 1.0) -> DiskFile:
    content = content_of(address)
    return disk.put(address, lambda: content, len(content), last_used=last_used)


def put_point(
    disk: Disk,
    address: Address,
    *,
    reason: int,
    is_kept: bool = False,
    is_superseded: bool = False,
    last_used: float | None = None,
) -> None:
    """Note a restore point; it was used just now unless told otherwise."""
    used = disk.now() if last_used is None else last_used
    disk.put_point(PointRecord(address, reason, is_kept, is_superseded, used))


def get(disk: Disk, file: DiskFile) -> bytearray:
    """Read one file and wait for it, as a load would do for many. Raises DiskMiss."""
    reads = disk.reader.open_list()
    reads.want([file])
    try:
        with disk.reader.changed:
            assert disk.reader.changed.wait_for(lambda: reads.num_done, BOUND_S), "reading took too long"
        read = reads.find(file)
        assert read is not None
        return disk.take(read)
    finally:
        reads.close()


def put_path(disk: Disk, tokens: Sequence[int], *, group: int = 0, salt: str = "") -> list[DiskFile]:
    """Put every page of these tokens, the last one as far as it goes."""
    ends = [*range(PAGE, len(tokens) + 1, PAGE)] + ([len(tokens)] if len(tokens) % PAGE else [])
    starts = [(end - 1) // PAGE * PAGE for end in ends]
    pages = zip(starts, ends, strict=True)
    return [put(disk, address_of(disk, tokens[:end], start, group=group, salt=salt)) for start, end in pages]


def save(disk: Disk, file: DiskFile) -> bool:
    """Let a file be written ahead of all else, and wait for it; False if that failed."""
    disk.prioritize(file)
    disk._writer.wait_for(lambda: file.is_saved or file.has_failed or not disk._ledger.is_live(file), None)
    return file.is_saved


@contextmanager
def held_writer(disk: Disk) -> Iterator[list[DiskFile]]:
    """Keep the writer busy with a write of its own for as long as the block lasts."""
    has_begun, may_end = threading.Event(), threading.Event()

    def read() -> bytes:
        has_begun.set()
        assert may_end.wait(BOUND_S)
        return b"held"

    disk_file = disk.put(address_of(disk, [2**31 - 1], 0, salt="held"), read, 4)
    assert has_begun.wait(BOUND_S)
    try:
        yield [disk_file]
    finally:
        may_end.set()


@contextmanager
def long_back_off(disk: Disk) -> Iterator[None]:
    """After a failure in this block, writing backs off until the block ends, however long that takes."""
    disk._writer._back_off_s = 1e6
    yield
    end_back_off(disk)


def end_back_off(disk: Disk) -> None:
    """Let the disk be tried again now."""
    with disk._ledger.changed:
        disk._writer._back_off_until = disk._ledger.back_off_until = 0.0
        disk._ledger.changed.notify_all()
