"""File descriptors on every system: private files, one owner of a file, names that outlive a crash.

POSIX has calls for all of this. Windows lacks some of them; what they do is done here by other means, or left out where the
system needs no such thing. The rest of the cache calls `os` only for what every system has.

- Windows has no modes of files: what lies in a user's own folders is that user's alone.
- There a lock is on bytes of a file, and nobody else can read these. So it is on one byte far behind the content.
- There a folder cannot be synced.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows does not have it
    fcntl = None  # type: ignore[assignment]

_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # for no child; line ends stay as they are
_LOCKED_BYTE = 2**30


def open_to_read(file: Path) -> int:
    return os.open(file, os.O_RDONLY | _ALWAYS)


def open_private(file: Path, flags: int) -> int:
    """Open a file that is made if it is not there, and that only its owner can read, whatever the umask says."""
    descriptor = os.open(file, flags | os.O_CREAT | _ALWAYS, 0o600)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Become the one owner of a file until the descriptor is closed; False if another process or descriptor is.

    Raises OSError if the system has no locks, or the file system has none.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_byte(descriptor)
    except (BlockingIOError, PermissionError):  # the second is what Windows says
        return False
    return True


def _lock_byte(descriptor: int) -> None:
    try:
        msvcrt = importlib.import_module("msvcrt")
    except ImportError as error:
        raise OSError("this system can lock no files: Python has neither fcntl nor msvcrt here") from error
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)


def replace_content(descriptor: int, content: bytes) -> None:
    """Replace what a small file holds."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, content)


def write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write some of the parts in their order, and return how many bytes that were."""
    return os.writev(descriptor, parts) if hasattr(os, "writev") else os.write(descriptor, parts[0])


def read_into(descriptor: int, view: memoryview) -> int:
    """Read the next bytes of a file into a buffer, and return how many there were; 0 at its end."""
    if hasattr(os, "readv"):
        return os.readv(descriptor, [view])
    content = os.read(descriptor, len(view))
    view[: len(content)] = content
    return len(content)


def open_folder(folder: Path) -> int | None:
    """A folder, to be synced; None where folders cannot be opened: there the system writes names by itself."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS) if hasattr(os, "O_DIRECTORY") else None
