"""One owner at a time: a lock on a tree's folder that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from bough.cache.disk.descriptors import open_private, replace_content, try_lock
from bough.cache.disk.errors import DiskBusy
from bough.system.processes import is_alive

LOCK = "lock"


class FolderLock:
    """Holds `folder/lock` from construction to `release`, with its process id in it; raises DiskBusy if another does.

    A forked child has a descriptor of the same lock, which stays its parent's until that releases it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._pid = os.getpid()
        while True:
            self._descriptor = open_private(self._file, os.O_RDWR)
            try:
                if not try_lock(self._descriptor):
                    raise DiskBusy(folder, recorded_pid(folder))
                if self._is_in_place():
                    replace_content(self._descriptor, f"{self._pid}\n".encode())
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # the tree was removed between open and lock: begin again

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that took the lock."""
        return self._pid != os.getpid()

    def release(self) -> None:
        """Release the lock; the file stays, empty. A second call does nothing. A forked child only closes its own."""
        if self._descriptor >= 0:
            if not self.is_inherited:
                with contextlib.suppress(OSError):
                    replace_content(self._descriptor, b"")
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file and release the lock; in this order where the system lets open files be deleted."""
        if os.name == "nt":
            self.release()
        self._file.unlink()
        self.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def recorded_pid(folder: Path) -> int | None:
    """The process id that the lock file names, alive or not."""
    try:
        return int((folder / LOCK).read_bytes()[:32])
    except (OSError, ValueError):
        return None


def owner_pid(folder: Path) -> int | None:
    """The process that seems to have the tree open, found without touching the lock; None if none has."""
    pid = recorded_pid(folder)
    return pid if pid is not None and is_alive(pid) else None
