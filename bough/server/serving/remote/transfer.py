"""Archives on their way between the server and one replica, in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import Imported
from bough.cache.disk import DiskError
from bough.cache.disk.folder import translate_errors
from bough.errors import Unavailable
from bough.server.serving.remote.archives import PIECE_BYTES
from bough.server.serving.remote.messages import Operation
from bough.server.serving.remote.replicas import ReplicaLost, Replicas

_DROP_S = 1.0  # a replica that does not answer deletes the archive itself, when nobody asks for it any more


class Transfer:
    """One archive at one replica. Raises Unavailable if that is lost."""

    def __init__(self, replicas: Replicas, replica: str) -> None:
        self._replicas = replicas
        self._replica = replica
        self._id = secrets.token_hex(8)

    async def fetch(self, file: Path, salt: str, disk_bytes: int) -> None:
        """Have the tree of a salt written there, and copy it into a file here. Raises DiskError, RequestError."""
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

    async def send(self, file: Path, salt: str) -> Imported:
        """Copy a file there, and have it added to the tree of a salt. Raises DiskError, RequestError."""
        offset = 0
        with translate_errors(file), file.open("rb") as source:
            while piece := await asyncio.to_thread(source.read, PIECE_BYTES):
                await self._call("add_to_archive", offset, piece)
                offset += len(piece)
        imported: Imported | None = None
        while imported is None:
            imported = await self._call("import_archive", salt)
        return imported

    async def drop(self) -> None:
        """Let the replica delete what it has of the archive."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_DROP_S):
                await self._call("drop_archive")

    async def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return await self._replicas.call(Operation(self._replica, operation, (self._id, *arguments)))
        except ReplicaLost as error:
            raise Unavailable(f"{self._replica} was lost; try again soon") from error


@asynccontextmanager
async def transferring(replicas: Replicas, replica: str) -> AsyncIterator[Transfer]:
    """A transfer of which nothing is left at the replica."""
    transfer = Transfer(replicas, replica)
    try:
        yield transfer
    finally:
        await transfer.drop()
