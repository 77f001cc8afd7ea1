"""The members of an archive, in a plain tar file: written one after another, and read with every claim checked."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from bough.cache.disk import page_files
from bough.cache.disk.descriptors import open_private
from bough.cache.disk.errors import DiskError
from bough.cache.disk.folder import translate_errors


class ArchiveWriter:
    """Writes the members of an archive one after another, in the pieces that they come in."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.end = 0

    def add(self, name: str, nbytes: int, pieces: Iterable[memoryview]) -> None:
        """Add a member of so many bytes."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = nbytes, 0o600
        self._write(memoryview(member.tobuf(tarfile.GNU_FORMAT)))
        for piece in pieces:
            self._write(piece)
        self._write(memoryview(bytes(-self.end % tarfile.BLOCKSIZE)))

    def go_back(self, end: int) -> None:
        """Remove what was written after this place."""
        os.truncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        self.end = end

    def finish(self) -> None:
        """Write the end of the archive."""
        self._write(memoryview(bytes(2 * tarfile.BLOCKSIZE)))
        self._write(memoryview(bytes(-self.end % tarfile.RECORDSIZE)))

    def _write(self, piece: memoryview) -> None:
        page_files.write_all(self._descriptor, [piece])
        self.end += len(piece)


@contextlib.contextmanager
def write_archive(file: Path) -> Iterator[ArchiveWriter]:
    """Give a new archive to write, which gets its name when all is written."""
    temporary = file.with_name(f".{file.name}.tmp")
    with translate_errors(file):
        try:
            descriptor = open_private(temporary, os.O_WRONLY | os.O_TRUNC)
            try:
                yield (archive := ArchiveWriter(descriptor))
                archive.finish()
                page_files.sync(descriptor)
            finally:
                os.close(descriptor)
            page_files.rename(temporary, file)
            page_files.sync_folder(file.parent)
        finally:
            temporary.unlink(missing_ok=True)


class ArchiveReader:
    """The members of an archive, one after another: plain files alone, and every claim of a header is checked.

    The library's own reader takes long names and other extensions into memory, however long they say they are.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._next = 0

    def next(self) -> tarfile.TarInfo | None:
        """The next member, or None at the end. Raises TarError if there is none of the kind that we write."""
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


@contextlib.contextmanager
def open_archive(file: Path) -> Iterator[ArchiveReader]:
    with translate_errors(file):
        try:
            with file.open("rb") as stream:
                yield ArchiveReader(stream)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise DiskError(f"{file} is not an archive of a tree: {error}") from error
