"""Files on their way to or from a client: each lies in a folder of the cache until it was taken over or sent."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from bough.errors import TooLarge

_STALE_S = 86_400.0


def make_file(folder: Path) -> Path:
    """A new empty file that only its owner can read. What a killed server left behind long ago goes meanwhile."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.iterdir():
        with suppress(OSError):  # another transfer may have ended meanwhile, and its file gone
            if time.time() - old.stat().st_mtime > _STALE_S:
                old.unlink()
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tar")
    os.close(descriptor)
    return Path(name)


@contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """A file for as long as the context lasts."""
    file = make_file(folder)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


async def spool(pieces: AsyncIterator[bytes], file: Path, limit: int) -> int:
    """Write a body to a file as it comes, and return its size. Raises TooLarge."""
    size = 0
    with file.open("wb") as output:
        async for piece in pieces:
            size += len(piece)
            if size > limit:
                raise TooLarge(size, limit)
            await asyncio.to_thread(output.write, piece)
    return size


class SentOnce(FileResponse):
    """A file that is deleted when it was sent, or when nobody waits for it any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)
