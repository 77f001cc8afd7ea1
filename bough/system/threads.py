"""Threads that work behind the others' backs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def give_way() -> None:
    """Let this thread have the processor after all others; where a thread has no priority of its own, nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
