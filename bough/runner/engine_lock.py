"""Turns: one thread at a time runs the engine, and Python's own Ctrl-C does not interrupt it in the middle of a step.

A stream that is garbage-collected may be finalised anywhere, also inside a turn of the same thread, in the middle of a
forward pass or of a record. Then it is set aside and closed when that turn ends. In the same way Ctrl-C waits for the end
of a turn, which is a chunk or a token away: KeyboardInterrupt between any two lines would leave the tree half changed.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
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
        self._shields = False  # whether Ctrl-C is held back now
        self._was_interrupted = False

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._owner = threading.get_ident()
            self._depth += 1
            if self._depth == 1:
                self._hold_interrupts_back()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while self._depth == 1 and self._abandoned:
                self._abandoned.popleft().close()
        finally:
            self._depth -= 1
            was_interrupted = self._depth == 0 and self._let_interrupts_through()
            if self._depth == 0:
                self._owner = None
            self._lock.release()
        if was_interrupted:
            raise KeyboardInterrupt

    def _hold_interrupts_back(self) -> None:
        """Note Ctrl-C instead of raising it; only where Python would raise it, that is in the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)
            self._shields = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._was_interrupted = True

    def _let_interrupts_through(self) -> bool:
        """Let Ctrl-C be raised again; tells whether one came meanwhile."""
        if not self._shields:
            return False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._shields = False
        was_interrupted, self._was_interrupted = self._was_interrupted, False
        return was_interrupted

    def close(self, steps: Closable) -> None:
        """Close something in a turn of its own; inside a turn of this thread, at that turn's end."""
        if self._owner == threading.get_ident():
            self._abandoned.append(steps)
            return
        with self:
            steps.close()
