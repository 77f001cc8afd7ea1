"""Python as Windows has it, as far as Linux can show it: modules and functions of POSIX alone are hidden, then a task runs.

    python -m tests.without_posix import              # prints the modules of bough that cannot be imported, and why
    python -m tests.without_posix hold FOLDER         # holds a folder's lock until it is killed; prints "held"
    python -m tests.without_posix take FOLDER         # prints "taken", or who has the lock
    python -m tests.without_posix test FILES…         # runs pytest

`msvcrt` is played by locks of Linux on single bytes that belong to a descriptor (F_OFD_SETLK), as those of Windows do.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import importlib.abc
import os
import pkgutil
import struct
import subprocess  # noqa: F401  # before there is an msvcrt, by which it knows Windows
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HIDDEN_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog", "crypt"}
HIDDEN_NAMES = ("O_CLOEXEC", "O_DIRECTORY", "fchmod", "pread", "pwrite", "readv", "writev", "preadv", "pwritev", "sysconf")
NOT_ON_WINDOWS = ("bough.engines.mlx", "bough.ray")  # MLX is for macOS and Linux, Ray an extra of its own
NO_FCNTL = "only soft file lock is available"  # what filelock says where neither fcntl nor Windows is
NOT_A_MODULE = ("bough.__main__", "bough.engines.torch.cpu._kernels")


class _Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in HIDDEN_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def hide_posix() -> None:
    """Hide it from all that is imported from now on."""
    sys.modules["msvcrt"] = _make_msvcrt()
    for name in HIDDEN_MODULES:
        sys.modules.pop(name, None)
    for name in HIDDEN_NAMES:
        if hasattr(os, name):
            delattr(os, name)
    sys.meta_path.insert(0, _Hiding())


def _make_msvcrt() -> ModuleType:
    set_lock, number, exclusive = fcntl.fcntl, fcntl.F_OFD_SETLK, fcntl.F_WRLCK

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        assert mode == module.LK_NBLCK
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            set_lock(descriptor, number, struct.pack("hhqqi4x", exclusive, os.SEEK_SET, position, num_bytes, 0))
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module = ModuleType("msvcrt")
    module.LK_NBLCK, module.locking = 2, locking  # type: ignore[attr-defined]
    return module


def import_all() -> None:
    """Print each module that cannot be imported. Triton's kernels need Triton, which need not be there."""
    import bough

    for found in pkgutil.walk_packages(bough.__path__, "bough.", onerror=lambda name: None):
        if not found.name.startswith(NOT_ON_WINDOWS) and found.name not in NOT_A_MODULE:
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    print(f"{found.name}: {error}")


def hold(folder: str) -> None:
    from bough.cache.disk.lock import FolderLock

    with FolderLock(Path(folder)):
        print("held", flush=True)
        sys.stdin.read()


def take(folder: str) -> None:
    from bough.cache.disk.errors import DiskBusy
    from bough.cache.disk.lock import FolderLock

    try:
        with FolderLock(Path(folder)) as lock:
            lock.remove()
            print("taken")
    except DiskBusy as busy:
        print(f"process {busy.pid} has it")


def run_tests(*arguments: str) -> None:
    import pytest

    of_filelock = f"ignore:{NO_FCNTL}:UserWarning"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", of_filelock, *arguments]))


TASKS: dict[str, Callable[..., None]] = {"import": import_all, "hold": hold, "take": take, "test": run_tests}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", NO_FCNTL, UserWarning)
    hide_posix()
    TASKS[sys.argv[1]](*sys.argv[2:])
