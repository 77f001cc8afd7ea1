"""The files of pages and states: their format, writing them so that they are whole or not there, and reading with proof.

    8 bytes    magic, with the format's version
    4 bytes    length of the header
    4 bytes    crc32 of the header
    header     group, start, end, payload bytes, crc32 of the payload; fingerprint, root, before, tokens
    payload    the packed rows or state

A file is written under a temporary name, synced and renamed; `sync_folders` makes the names safe. All reading and writing
of files goes through the functions at the end, which tests replace to make the disk fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from bough.cache.disk.errors import DAMAGED, FOREIGN, MISSING, TRUNCATED, UNREADABLE, DiskMiss, DiskSlow
from bough.cache.tree.address import Address, DiskFile
from bough.cache.tree.state import Buffer

MAGIC = b"BOUGHPG1"
PAGES, TEMPORARY = "pages", "tmp"
MAX_HEADER_BYTES = 2**24
READ_BYTES = 2 * 2**20  # read at a time; in between a read can be given up

KeepReading = Callable[[int], bool]
"""Called with the number of payload bytes read so far; returns whether to go on."""

_PREFIX = struct.Struct("<8sII")
_HEADER = struct.Struct("<iqqQIIIII")  # group, start, end, payload bytes and crc32; lengths of the four that follow


def always(done_bytes: int) -> bool:
    return True


def encode_header(fingerprint: str, address: Address, payload_bytes: int, payload_crc: int) -> bytes:
    """Everything before the payload."""
    texts = (fingerprint.encode(), address.root, address.before, address.tokens)
    numbers = (address.group, address.start, address.end, payload_bytes, payload_crc, *map(len, texts))
    header = _HEADER.pack(*numbers) + b"".join(texts)
    return _PREFIX.pack(MAGIC, len(header), crc32(header)) + header


class PageFiles:
    """The page files below one tree's folder, for one fingerprint."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._pages, self._temporary = folder / PAGES, folder / TEMPORARY
        self._fingerprint = fingerprint
        self._unsynced: set[Path] = set()

    def prepare(self) -> None:
        """Make the folders, and remove the temporary files of a killed process."""
        for folder in (self._pages, self._temporary):
            make_private_folder(folder)
        for file in list(self._temporary.iterdir()):
            file.unlink()
        self._unsynced.add(self._pages)  # a killed process may have made folders there and not synced them

    def path(self, name: bytes) -> Path:
        text = name.hex()
        return self._pages / text[:2] / text

    def size(self, address: Address, payload_bytes: int) -> int:
        texts = len(self._fingerprint.encode()) + len(address.root) + len(address.before) + len(address.tokens)
        return _PREFIX.size + _HEADER.size + texts + payload_bytes

    def write(self, name: bytes, address: Address, payload: Buffer) -> int:
        """Write one whole file, or nothing, and return its size; its name is safe only after `sync_folders`."""
        content = memoryview(payload).cast("B")
        header = encode_header(self._fingerprint, address, len(content), crc32(content))
        file = self.path(name)
        if file.parent not in self._unsynced and not file.parent.is_dir():
            make_private_folder(file.parent)
            self._unsynced.add(self._pages)
        with new_file(file, self._temporary / name.hex()) as descriptor:
            write_all(descriptor, [memoryview(header), content])
        self._unsynced.add(file.parent)
        return len(header) + len(content)

    def sync_folders(self) -> None:
        """Make the names of all files written so far safe."""
        for folder in sorted(self._unsynced):  # `pages` before its subfolders
            sync_folder(folder)
        self._unsynced.clear()

    def read(self, disk_file: DiskFile, keep_reading: KeepReading = always) -> bytearray:
        """The payload, with header, size and checksum verified. Raise DiskMiss, or DiskSlow if `keep_reading` stops it.

        Any thread may read.
        """
        file = self.path(disk_file.name)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DiskMiss(MISSING, str(file)) from None
        except OSError as error:
            raise DiskMiss(UNREADABLE, str(error)) from None
        try:
            payload_bytes, payload_crc = self._read_header(descriptor, disk_file.address)
            if (size := self.size(disk_file.address, payload_bytes)) != disk_file.nbytes:
                raise DiskMiss(DAMAGED, f"it has {size} bytes, and the index says {disk_file.nbytes}")
            content = _read_exactly(descriptor, payload_bytes, keep_reading)
            if crc32(content) != payload_crc:
                raise DiskMiss(DAMAGED, "the checksum of its payload is wrong")
            return content
        except OSError as error:
            raise DiskMiss(UNREADABLE, f"{file}: {error}") from None
        except DiskMiss as miss:
            raise DiskMiss(miss.reason, f"{file}: {miss.detail}") from None
        finally:
            os.close(descriptor)

    def remove(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)

    def names(self) -> Iterator[list[tuple[str, bytes | None]]]:
        """Every file with its name, folder by folder; the name is None for what cannot be ours."""
        for folder in sorted(self._pages.glob("*")):
            if folder.is_dir():
                with os.scandir(folder) as entries:
                    files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
                yield [(entry.path, _parse_name(folder.name, entry.name)) for entry in files]

    def _read_header(self, descriptor: int, address: Address) -> tuple[int, int]:
        """Verify the header; return the number of bytes and the checksum of the payload, which follows."""
        size = os.fstat(descriptor).st_size
        prefix = _read_exactly(descriptor, _PREFIX.size)
        magic, header_bytes, header_crc = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise DiskMiss(FOREIGN if magic[:-1] == MAGIC[:-1] else DAMAGED, f"it begins with {magic!r}")
        if not _HEADER.size <= header_bytes <= MAX_HEADER_BYTES:
            raise DiskMiss(DAMAGED, f"its header claims {header_bytes} bytes")
        header = _read_exactly(descriptor, header_bytes)
        if crc32(header) != header_crc:
            raise DiskMiss(DAMAGED, "the checksum of its header is wrong")
        payload_bytes, payload_crc = _HEADER.unpack_from(header)[3:5]
        if prefix + header != encode_header(self._fingerprint, address, payload_bytes, payload_crc):
            raise DiskMiss(FOREIGN, "it is of another prefix, group or model")
        expected = _PREFIX.size + header_bytes + payload_bytes
        if size != expected:
            raise DiskMiss(TRUNCATED if size < expected else DAMAGED, f"{size} of {expected} bytes")
        return payload_bytes, payload_crc


def _read_exactly(descriptor: int, num_bytes: int, keep_reading: KeepReading = always) -> bytearray:
    content = bytearray(num_bytes)
    view, done = memoryview(content), 0
    while done < num_bytes:
        if not (count := read_into(descriptor, view[done : done + READ_BYTES])):
            raise DiskMiss(TRUNCATED, f"it ends {num_bytes - done} bytes early")
        done += count
        if not keep_reading(done):
            raise DiskSlow(done)
    return content


def _parse_name(folder: str, text: str) -> bytes | None:
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if name.hex() == text and text.startswith(folder) else None


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, whatever the umask."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o777 != 0o700:
        folder.chmod(0o700)


def open_private(file: Path, flags: int) -> int:
    """Open a file that only its owner can read, whatever the umask; create it if it does not exist."""
    descriptor = os.open(file, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(file: Path, content: bytes) -> None:
    """Write a small file that only its owner can read: whole and safe on the disk, or not at all."""
    with new_file(file, file.with_name(file.name + ".tmp")) as descriptor:
        write_all(descriptor, [memoryview(content)])
    sync_folder(file.parent)


@contextlib.contextmanager
def new_file(file: Path, temporary: Path) -> Iterator[int]:
    """Write a file that only its owner can read, inside the context: afterwards it is synced and has its name.

    If anything fails, nothing is left. The name is safe only after `sync_folder`.
    """
    try:
        descriptor = open_private(temporary, os.O_WRONLY | os.O_TRUNC)
        try:
            yield descriptor
            sync(descriptor)
        finally:
            os.close(descriptor)
        rename(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, parts: list[memoryview]) -> None:
    """Write the parts one after the other, in as many calls as the kernel needs."""
    left = [part for part in parts if len(part)]
    while left:
        if not (count := write_some(descriptor, left)):
            raise OSError(errno.EIO, "nothing could be written")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def write_some(descriptor: int, parts: list[memoryview]) -> int:
    """Write the beginning of the parts, in their order, and return the number of bytes written."""
    return os.writev(descriptor, parts)


def read_into(descriptor: int, view: memoryview) -> int:
    """Read the next bytes of a file into a buffer, and return their number; 0 at its end."""
    return os.readv(descriptor, [view])


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    old.replace(new)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
