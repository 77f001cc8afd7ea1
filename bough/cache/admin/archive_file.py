"""The file of an archive: a tar file that is written and read one member after another, and says which model it is of.

Members are plain files, read as streams and never extracted, so that an archive cannot write anywhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from bough.cache.disk import Disk, page_files
from bough.cache.disk.errors import DiskError, DiskMiss
from bough.cache.disk.folder import translate_errors
from bough.cache.disk.index_rows import MAX_PAGE_TOKENS
from bough.cache.disk.keys import PageKeys
from bough.cache.store.format import MAX_OBJECT_BYTES

FORMAT = 2
HEAD, OLD_HEAD = "archive.json", "manifest.json"
"""The first member, and that of archives of the earlier format."""

_MAX_HEAD_BYTES = 2**16
_LONGEST_TEXT = 1_000


@dataclass(frozen=True)
class ArchiveHead:
    """Which model an archive is of."""

    fingerprint: str
    model: str
    page_tokens: int

    @classmethod
    def of(cls, disk: Disk) -> ArchiveHead:
        return cls(disk.identity.fingerprint, disk.identity.model, disk.identity.page_tokens)

    def is_like(self, other: ArchiveHead) -> bool:
        """Whether the state of one can be used with the other; the model may have another name."""
        return (self.fingerprint, self.page_tokens) == (other.fingerprint, other.page_tokens)

    @property
    def keys(self) -> PageKeys:
        """The hashes in an archive, which have no secret."""
        return PageKeys(b"", self.fingerprint, self.page_tokens)

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, "byte_order": sys.byteorder} | asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> ArchiveHead:
        """Raise ValueError if this is no head, or of another format."""
        try:
            data = json.loads(content)
            found = data.pop("format"), data.pop("byte_order")
            head = cls(**data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its {HEAD} cannot be read: {error!r:.200}") from error
        if found != (FORMAT, sys.byteorder):
            raise ValueError(f"it has format {found[0]!r:.40}, {found[1]!r:.40}-endian, and {FORMAT} is wanted")
        for text in (head.fingerprint, head.model):
            if type(text) is not str or len(text) > _LONGEST_TEXT or not text.isprintable():
                raise ValueError(f"{text!r:.40} is not a printable text of at most {_LONGEST_TEXT} characters")
        if type(head.page_tokens) is not int or not 1 <= head.page_tokens <= MAX_PAGE_TOKENS:
            raise ValueError(f"its page_tokens is {head.page_tokens!r:.40}, and must be from 1 to {MAX_PAGE_TOKENS}")
        return head


class ArchiveWriter:
    """Writes the members of an archive one after another."""

    def __init__(self, file: Path, tar: tarfile.TarFile, is_wanted: Callable[[], bool]) -> None:
        self._file, self._tar, self._is_wanted = file, tar, is_wanted

    def add(self, name: str, content: bytes, last_used: float = 0.0) -> None:
        """Add a member. Raises DiskError if the archive is no longer wanted."""
        if not self._is_wanted():
            raise DiskError(f"the export to {self._file} was given up")
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = len(content), 0o600, int(last_used)
        self._tar.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
def new_archive(file: Path, head: ArchiveHead, is_wanted: Callable[[], bool]) -> Iterator[ArchiveWriter]:
    """A new archive, to which objects are added; it gets its name when all is written."""
    with translate_errors(file):
        with (
            page_files.new_file(file, file.with_name(f".{file.name}.tmp")) as descriptor,
            open(descriptor, "wb", closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            archive = ArchiveWriter(file, tar, is_wanted)
            archive.add(HEAD, head.encode())
            yield archive
        page_files.sync_folder(file.parent)


class ArchiveReader:
    """The members of an archive, one after another: plain files alone, and every claim of a header is checked.

    The standard library's reader takes long names and other extensions into memory, however long they claim to be.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._next = 0
        self.head = self._read_head()

    def next(self) -> tarfile.TarInfo | None:
        """The next member, or None at the end. Raises TarError if it is not of the kind that we write."""
        self._stream.seek(self._next)
        block = self._stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"it ends early, after {self._size:,} bytes")
        if not block.strip(b"\0"):
            return None
        member = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not 0 <= member.size <= MAX_OBJECT_BYTES:
            raise tarfile.ReadError(f"{member.name!r:.100} is no plain file of at most {MAX_OBJECT_BYTES:,} bytes")
        if self._next + tarfile.BLOCKSIZE + member.size > self._size:
            raise tarfile.ReadError(f"{member.name!r:.100} claims {member.size:,} bytes, more than there are")
        self._next += tarfile.BLOCKSIZE + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return member

    def read(self, member: tarfile.TarInfo) -> bytes:
        """The content of the member that came last."""
        return self._stream.read(member.size)

    def _read_head(self) -> ArchiveHead:
        """What the first member says. Raises ValueError if it makes no sense."""
        member = self.next()
        if member is not None and member.name == OLD_HEAD:
            raise ValueError(f"it has format 1, and this version reads format {FORMAT}: export the tree again")
        if member is None or member.name != HEAD or member.size > _MAX_HEAD_BYTES:
            raise ValueError(f"it does not begin with {HEAD}")
        return ArchiveHead.decode(self.read(member))


@contextlib.contextmanager
def open_archive(file: Path) -> Iterator[ArchiveReader]:
    with translate_errors(file):
        try:
            with file.open("rb") as stream:
                yield ArchiveReader(stream)
        except (tarfile.TarError, EOFError, ValueError, DiskMiss) as error:
            raise DiskError(f"{file} is not an archive of a tree: {error}") from error


def read_head(file: Path) -> ArchiveHead:
    """Which model an archive is of; raises DiskError if the file is not an archive."""
    with open_archive(file) as archive:
        return archive.head
