"""The errors of a tree on disk, and warnings that are not repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bough.errors import BoughError

MISSING, UNREADABLE, TRUNCATED, DAMAGED, FOREIGN = "missing", "unreadable", "truncated", "damaged", "foreign"
REASONS = (MISSING, UNREADABLE, TRUNCATED, DAMAGED, FOREIGN)
WARN_EVERY_S = 60.0


class DiskError(BoughError):
    """A tree on disk cannot be opened, cleared, exported or imported; the message names the path and the reason."""


class NotOwner(DiskError):
    """A tree's folder cannot be taken, but may still be read; `why` is the reason as part of a sentence."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class DiskBusy(NotOwner):
    """Another process, or another store of this process, has the tree's folder open."""

    def __init__(self, folder: Path, pid: int | None) -> None:
        owner = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            f"the tree in {folder} is in use by {owner}; stop that process, or run this one without a disk or with "
            "another cache folder",
            f"in use by {owner}",
        )
        self.folder = folder
        self.pid = pid


class ReadOnlyTree(DiskError):
    """An attempt to change a tree that this process only reads."""

    def __init__(self, problem: str, folder: Path, why: str) -> None:
        super().__init__(f"{problem}: this process only reads the tree {folder.name}, which was {why} when it was opened")


class DiskUnwritable(NotOwner):
    """A tree's folder cannot be written by this user, or at all."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder} cannot be written: {problem}", f"in a folder that cannot be written ({problem})")


class DiskMiss(BoughError):
    """A file could not be loaded: it is missing, unreadable, truncated, damaged, or of another page."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"a file on disk is {reason}" + (f": {detail}" if detail else ""))
        self.reason = reason
        self.detail = detail


class DiskSlow(BoughError):
    """Reading a file was given up after `done_bytes`. The file may be good."""

    def __init__(self, done_bytes: int) -> None:
        super().__init__(f"reading was given up after {done_bytes:,} bytes")
        self.done_bytes = done_bytes


class Warnings:
    """Passes on at most one warning of a kind in a minute."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned_at: dict[str, float] = {}

    def say(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(kind, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_at[kind] = now
            self._warn(message)
