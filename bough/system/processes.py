"""Processes of this machine."""

from __future__ import annotations

import os


def is_alive(pid: int) -> bool:
    """Whether a process with this id runs, of whichever user. A number that cannot be an id is none."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's process
    return True
