"""Archives on their way between this replica and a server: files here until the server has read or sent them.

They go in pieces, so that neither side has more than one of them in memory. Writing and importing may take minutes: a
server asks again until they are done. An archive that no server asks for any more is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import Imported
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.server.serving.model.contract import ServedTree
from bough.server.serving.remote.leases import Leases
from bough.server.serving.transfers import make_file, require_room

PIECE_BYTES = 2**20
WAIT_S = 20.0
"""So long a server waits for a result that is not there yet, before it asks again."""


@dataclass
class _Archive:
    """A file, and what writes or imports it."""

    file: Path | None = None
    work: asyncio.Task[Any] | None = None


class Archives:
    """The archives by their ids. Everything here runs on one event loop."""

    def __init__(self, tree: ServedTree, settings: Settings) -> None:
        self._tree = tree
        self._settings = settings
        self._leases: Leases[_Archive] = Leases(_Archive, _drop)

    def __len__(self) -> int:
        return len(self._leases)

    async def write(self, archive_id: str, salt: str, disk_bytes: int) -> int | None:
        """Write the tree of a salt into an archive; its size, or None if that is not done yet.

        Raises Unavailable if there is no room for so many bytes, DiskError, or RequestError without a disk.
        """
        archive = self._leases.use(archive_id)
        if archive.work is None:
            archive.work = asyncio.create_task(self._write(archive, salt, disk_bytes))
        size: int | None = await _wait(archive.work)
        return size

    async def _write(self, archive: _Archive, salt: str, disk_bytes: int) -> int:
        await asyncio.to_thread(require_room, self._settings, disk_bytes)
        file = archive.file = await asyncio.to_thread(self._make_file)
        await _run(self._tree.export_file(file, salt), file)
        return file.stat().st_size

    async def read(self, archive_id: str, offset: int) -> bytes:
        """A piece of an archive that was written. Raises DiskError."""
        return await asyncio.to_thread(_read, _require_file(self._leases.use(archive_id)), offset)

    async def add(self, archive_id: str, offset: int, piece: bytes) -> None:
        """Take a piece of an archive that is to be imported. Raises DiskError, or Unavailable without room."""
        archive = self._leases.use(archive_id)
        await asyncio.to_thread(require_room, self._settings, len(piece))
        if archive.file is None and offset == 0:
            archive.file = await asyncio.to_thread(self._make_file)
        await asyncio.to_thread(_append, _require_file(archive), piece)

    async def take_up(self, archive_id: str, salt: str) -> Imported | None:
        """Add an archive to the tree of a salt; None if that is not done yet. Raises DiskError or RequestError."""
        archive = self._leases.use(archive_id)
        if archive.work is None:
            file = _require_file(archive)
            archive.work = asyncio.create_task(_run(self._tree.import_file(file, salt), file))
        imported: Imported | None = await _wait(archive.work)
        return imported

    async def drop(self, archive_id: str) -> None:
        """Delete an archive, if it is there. What writes it ends."""
        await self._leases.close(archive_id)

    def _make_file(self) -> Path:
        with _translated():
            return make_file(self._settings)


async def _wait(work: asyncio.Task[Any]) -> Any:
    """The result of some work, or None if it is not there soon. The work goes on if the caller ends."""
    done, _ = await asyncio.wait([work], timeout=WAIT_S)
    return work.result() if done else None


async def _run(work: Coroutine[Any, Any, Any], file: Path) -> Any:
    """As `work`, with errors that do not say where the file lies."""
    try:
        return await work
    except DiskError as error:
        raise DiskError(str(error).replace(str(file), "the archive")) from error


async def _drop(archive: _Archive) -> None:
    if archive.work is not None:
        archive.work.cancel()
        await asyncio.gather(archive.work, return_exceptions=True)
    if archive.file is not None:
        archive.file.unlink(missing_ok=True)


@contextmanager
def _translated() -> Iterator[None]:
    """Failures of the system become DiskError, which does not say where the file lies."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"the archive cannot be kept at its replica: {error.strerror or error}") from error


def _require_file(archive: _Archive) -> Path:
    if archive.file is None:
        raise DiskError("the archive is not there any more: nobody has asked for it for too long")
    return archive.file


def _read(file: Path, offset: int) -> bytes:
    with _translated(), file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(PIECE_BYTES)


def _append(file: Path, piece: bytes) -> None:
    with _translated(), file.open("ab") as stream:
        stream.write(piece)
