"""Downloads a model for a client, and streams the progress line by line.

The work runs in a thread. If the client disconnects, it ends at its next step; the downloaded part is kept for another try.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from bough.errors import DownloadError
from bough.models.fetching.registry import KNOWN
from bough.models.store import plain_name
from bough.server.http.errors import format_plain_error, to_http_error
from bough.server.http.streaming import json_line
from bough.server.serving.catalog import Catalog

_LINE_EVERY_S = 0.1


class PullProgress:
    """The progress of a download. The working thread calls it; it puts lines into a queue, and None at the end."""

    def __init__(self, digest: str | None) -> None:
        self.lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.is_unwanted = False
        self._digest = {"digest": digest} if digest else {}
        self._loop = asyncio.get_running_loop()
        self._line: dict[str, Any] = {}
        self._told_s = 0.0

    def start(self, label: str, total_bytes: int | None) -> None:
        self._require_wanted()
        counted = {} if total_bytes is None else {**self._digest, "total": total_bytes, "completed": 0}
        self._line = {"status": label, **counted}
        self._tell(dict(self._line))

    def advance(self, num_bytes: int) -> None:
        self._require_wanted()
        if "total" in self._line:
            self._line["completed"] += num_bytes
        if time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._tell(dict(self._line))

    def finish(self) -> None:
        self._tell(dict(self._line))

    def end(self) -> None:
        """End the lines."""
        self._tell(None)

    def _require_wanted(self) -> None:
        if self.is_unwanted:
            raise DownloadError("the client disconnected")

    def _tell(self, line: dict[str, Any] | None) -> None:
        self._told_s = time.monotonic()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.lines.put_nowait, line)


async def pull_lines(name: str, catalog: Catalog, is_here: bool) -> AsyncIterator[str]:
    """The lines of a download. An error is the last line."""
    yield json_line({"status": "pulling manifest"})
    if not is_here:
        try:
            async with aclosing(_fetch_lines(name, catalog)) as lines:
                async for line in lines:
                    yield json_line(line)
        except Exception as error:
            yield json_line(format_plain_error(to_http_error(error)))
            return
    yield json_line({"status": "success"})


async def fetch(name: str, catalog: Catalog) -> None:
    """Download a model. Raises what `Catalog.pull` raises."""
    async with aclosing(_fetch_lines(name, catalog)) as lines:
        async for _ in lines:
            pass


async def _fetch_lines(name: str, catalog: Catalog) -> AsyncGenerator[dict[str, Any], None]:
    progress = PullProgress(_digest(name))
    work = asyncio.create_task(asyncio.to_thread(_pull, name, catalog, progress))
    try:
        while (line := await progress.lines.get()) is not None:
            yield line
        await work
    finally:
        progress.is_unwanted = True
        work.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # asyncio warns of exceptions that are never read


def _digest(name: str) -> str | None:
    """The digest by which clients know a download, if we know it before."""
    known = KNOWN.get(plain_name(name))
    return f"sha256:{known.gguf_sha256}" if known else None


def _pull(name: str, catalog: Catalog, progress: PullProgress) -> None:
    try:
        catalog.pull(name, progress)
    finally:
        progress.end()
