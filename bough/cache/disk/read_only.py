"""What takes the writer's place where a tree is only read, because another process owns it or its folder cannot be written.

Nothing is written, deleted, collected or re-dated. The ledger counts in memory as ever, but takes no new files.
"""

from __future__ import annotations

import math
from pathlib import Path

from bough.cache.disk.errors import ReadOnlyTree
from bough.cache.disk.index import index_bytes
from bough.cache.disk.ledger import Ledger
from bough.cache.disk.writer import Clearing


class NoWriter:
    """Does nothing, and says so where something was to be deleted; `why` says why the tree is only read."""

    is_alive = True
    is_failing = False
    failure = ""

    def __init__(self, ledger: Ledger, folder: Path, why: str) -> None:
        self.index_bytes = index_bytes(folder)
        self._ledger = ledger
        self._folder = folder
        self._why = why
        ledger.back_off(math.inf)

    @property
    def used_bytes(self) -> int:
        """What the files take that are still known here."""
        return self._ledger.claimed_bytes

    def stop(self) -> bool:
        return True

    def flush(self, timeout_s: float | None) -> bool:
        """There is nothing to wait for."""
        return True

    def settle(self, root: bytes | None) -> bool:
        """There is nothing to wait for."""
        return True

    def clear(self, root: bytes | None) -> Clearing:
        """Forget everything, or one root's. On disk all of it stays: waiting for that raises ReadOnlyTree."""
        self._ledger.clear(root)
        return Clearing(root)

    def wait_cleared(self, clearing: Clearing) -> None:
        raise ReadOnlyTree("nothing was deleted on disk, only in memory", self._folder, self._why)

    def want_measurement(self) -> None:
        """There is no need to know the free space."""
