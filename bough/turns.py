"""Turns: one thread at a time runs the engine.

A stream that is garbage-collected may be finalised anywhere, also inside a turn of the same thread, in the middle of a
forward pass or of a record. Then it is set aside and closed when that turn ends.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


class Turns:
    """A lock that a thread may take again inside its own turn, and that closes what was abandoned meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._abandoned: deque[Closable] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while self._depth == 1 and self._abandoned:
                self._abandoned.popleft().close()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
            self._lock.release()

    def close(self, steps: Closable) -> None:
        """Close something in a turn of its own; inside a turn of this thread, at that turn's end."""
        if self._owner == threading.get_ident():
            self._abandoned.append(steps)
            return
        with self:
            steps.close()
