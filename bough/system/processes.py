"""Processes of this machine, and the garbage collector of this one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def is_alive(pid: int) -> bool:
    """Whether a process of any user has this id."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    return True


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause the garbage collector: among very many new objects that all stay, its search takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
