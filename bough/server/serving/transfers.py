"""Archives of trees on their way to or from a client, as files in a folder of the cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bough.config import Settings
from bough.errors import Unavailable
from bough.system.resources import free_disk_bytes

_FOLDER = "transfers"
_STALE_S = 86_400.0


def make_file(settings: Settings) -> Path:
    """A new empty file that only its owner can read. Old files of a killed server are deleted."""
    folder = settings.cache_folder / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.iterdir():
        with suppress(OSError):  # another transfer may have ended meanwhile, and its file gone
            if time.time() - old.stat().st_mtime > _STALE_S:
                old.unlink()
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tar")
    os.close(descriptor)
    return Path(name)


@contextmanager
def temporary_file(settings: Settings) -> Iterator[Path]:
    file = make_file(settings)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def require_room(settings: Settings, num_bytes: int) -> int:
    """The largest size of a file that leaves `disk_free` bytes free. Raises Unavailable if this one would not."""
    free_bytes = free_disk_bytes(settings.cache_folder)
    room_bytes = free_bytes - settings.disk_free
    if num_bytes > room_bytes:
        left = f"{free_bytes:,} are free on the disk, and {settings.disk_free:,} of them must stay free"
        raise Unavailable(f"the archive may have {num_bytes:,} bytes: {left}")
    return room_bytes
