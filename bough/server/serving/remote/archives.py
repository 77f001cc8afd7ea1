"""Archives on their way between a server and a replica: `Archives` is the replica's side, `Transfer` the server's.

An archive is a file at the replica until the server has read or sent it. It goes in pieces, so that neither side has more
than one of them in memory. Writing and importing may take minutes: a server asks again until they are done. An archive that
no server asks for any more is deleted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.admin.archive import ImportResult
from bough.cache.disk import DiskError
from bough.cache.disk.folder import translate_errors
from bough.config import Settings
from bough.server.serving.model.contract import ServedTree
from bough.server.serving.remote.leases import Leases
from bough.server.serving.remote.replicas import Replicas, call_replica
from bough.server.serving.transfers import make_file, require_room
from bough.system.tasks import end_tasks

Result = TypeVar("Result")

PIECE_BYTES = 2**20
WAIT_S = 20.0
"""How long a server waits for a result before it asks again."""

_DROP_S = 1.0  # a replica that does not answer deletes the archive itself, when its lease ends


@dataclass
class _Archive:
    """A file, which a thread makes, and the task that writes or imports it. A caller that is cancelled leaves both."""

    file: asyncio.Task[Path]
    work: asyncio.Task[Any] | None = None


class Archives:
    """The archives by their ids. Everything here runs on one event loop."""

    def __init__(self, tree: ServedTree, settings: Settings) -> None:
        self._tree = tree
        self._settings = settings
        self._leases: Leases[_Archive] = Leases(self._make, _drop)

    def __len__(self) -> int:
        return len(self._leases)

    def _make(self) -> _Archive:
        def make() -> Path:
            with _translated():
                return make_file(self._settings)

        return _Archive(asyncio.create_task(asyncio.to_thread(make)))

    async def write(self, archive_id: str, salt: str, disk_bytes: int) -> int | None:
        """Write the tree of a salt into an archive; returns its size, or None if that is not done yet.

        Raise Unavailable if there is no room for `disk_bytes`, DiskError, or RequestError without a disk.
        """

        async def write(file: Path) -> int:
            await asyncio.to_thread(require_room, self._settings, disk_bytes)
            await self._tree.export_file(file, salt)
            return file.stat().st_size

        return await self._do(archive_id, write)

    async def read(self, archive_id: str, offset: int) -> bytes:
        """A piece of an archive that was written; empty if it is gone. Raise DiskError."""
        file = await asyncio.shield(self._leases.use(archive_id).file)
        return await asyncio.to_thread(_read, file, offset)

    async def add(self, archive_id: str, offset: int, piece: bytes) -> None:
        """Append a piece to an archive that is to be imported. Raise DiskError, or Unavailable without room."""
        archive = self._leases.use(archive_id)
        await asyncio.to_thread(require_room, self._settings, len(piece))
        await asyncio.to_thread(_append, await asyncio.shield(archive.file), offset, piece)

    async def take_up(self, archive_id: str, salt: str) -> ImportResult | None:
        """Add an archive to the tree of a salt; None if that is not done yet. Raise DiskError or RequestError."""
        return await self._do(archive_id, lambda file: self._tree.import_file(file, salt))

    async def drop(self, archive_id: str) -> None:
        """Delete an archive, if it is there, and cancel its work."""
        await self._leases.close(archive_id)

    async def _do(self, archive_id: str, work: Callable[[Path], Awaitable[Result]]) -> Result | None:
        """The result of work on an archive's file, which the first call starts; None if it takes longer than `WAIT_S`.

        The work goes on if the caller is cancelled. Its errors do not name the file.
        """

        async def run() -> Result:
            file = await asyncio.shield(archive.file)
            try:
                return await work(file)
            except DiskError as error:
                raise DiskError(str(error).replace(str(file), "the archive")) from error

        archive = self._leases.use(archive_id)
        if archive.work is None:
            archive.work = asyncio.create_task(run())
        done, _ = await asyncio.wait([archive.work], timeout=WAIT_S)
        return archive.work.result() if done else None


async def _drop(archive: _Archive) -> None:
    """Cancel the work and delete the file. A file that is still being made is awaited, so that it is deleted too."""
    if archive.work is not None:
        await end_tasks(archive.work)
    with suppress(DiskError):  # it could not be made: its caller has that error
        (await archive.file).unlink(missing_ok=True)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise DiskError for failures of the system, without the file's path."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"the archive cannot be kept at its replica: {error.strerror or error}") from error


def _read(file: Path, offset: int) -> bytes:
    with _translated(), file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(PIECE_BYTES)


def _append(file: Path, offset: int, piece: bytes) -> None:
    with _translated(), file.open("r+b") as stream:  # a file that was deleted meanwhile is not made again
        if stream.seek(0, os.SEEK_END) != offset:
            raise DiskError("the archive is not there any more: its server has not asked for it for too long")
        stream.write(piece)


class Transfer:
    """One archive at one replica, which deletes its part at the end of the context.

    `fetch` and `send` raise Unavailable if the replica is lost.
    """

    def __init__(self, replicas: Replicas, replica: str) -> None:
        self._replicas = replicas
        self._replica = replica
        self._id = secrets.token_hex(8)

    async def fetch(self, file: Path, salt: str, disk_bytes: int) -> None:
        """Have the replica write the tree of a salt, and copy that into `file`. Raise DiskError or RequestError."""
        size: int | None = None
        while size is None:
            size = await self._call("write_archive", salt, disk_bytes)
        offset = 0
        with translate_errors(file), file.open("wb") as output:
            while offset < size:
                piece: bytes = await self._call("read_archive", offset)
                if not piece:
                    raise DiskError(f"the archive of {self._replica} ended after {offset:,} of {size:,} bytes")
                await asyncio.to_thread(output.write, piece)
                offset += len(piece)

    async def send(self, file: Path, salt: str) -> ImportResult:
        """Send a file to the replica, and have it added to the tree of a salt. Raise DiskError or RequestError."""
        offset = 0
        with translate_errors(file), file.open("rb") as source:
            while piece := await asyncio.to_thread(source.read, PIECE_BYTES):
                await self._call("add_to_archive", offset, piece)
                offset += len(piece)
        imported: ImportResult | None = None
        while imported is None:
            imported = await self._call("import_archive", salt)
        return imported

    async def __aenter__(self) -> Transfer:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(Exception):
            async with asyncio.timeout(_DROP_S):
                await self._call("drop_archive")

    async def _call(self, operation: str, *arguments: Any) -> Any:
        return await call_replica(self._replicas, self._replica, operation, self._id, *arguments)
