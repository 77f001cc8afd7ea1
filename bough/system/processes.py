"""Processes of this machine, and the garbage collector of this one."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_QUERY_LIMITED_INFORMATION, _ACCESS_DENIED, _STILL_ACTIVE = 0x1000, 5, 259  # names and numbers of Windows


def is_alive(pid: int) -> bool:
    """Whether a process with this id runs, of whichever user. A number that cannot be an id is none."""
    if pid <= 0:
        return False
    if sys.platform == "win32":  # there os.kill would send Ctrl-C
        return _has_windows_process(pid)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    return True


def _has_windows_process(pid: int) -> bool:
    """Ask Windows for the exit code of a process: it has none before its end."""
    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(_QUERY_LIMITED_INFORMATION, False, ctypes.c_uint32(pid)))
    if not handle:
        return bool(ctypes.get_last_error() == _ACCESS_DENIED)  # type: ignore[attr-defined,unused-ignore]
    code = ctypes.c_uint32()
    is_known = kernel.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel.CloseHandle(handle)
    return bool(is_known) and code.value == _STILL_ACTIVE


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect no garbage meanwhile: among very many new objects that all stay, the search for it costs half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
