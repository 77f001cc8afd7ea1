"""The lock of the engine: one thread at a time runs the engine, and Ctrl-C does not interrupt it in the middle of a step.

A stream that is garbage-collected may be finalised anywhere, also while the same thread holds the lock, in the middle of a
forward pass. Then the stream is closed when the lock is released. Ctrl-C waits for the release in the same way, which is a
chunk or a token away: a KeyboardInterrupt between any two lines would leave the tree half changed.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


class EngineLock:
    """A reentrant lock. When it is released, it closes the streams that were abandoned while it was held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._abandoned: deque[Closable] = deque()
        self._holds_interrupts = False  # whether Ctrl-C is held back now
        self._was_interrupted = False

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._owner = threading.get_ident()
            self._depth += 1
            if self._depth == 1:
                self._hold_interrupts()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while self._depth == 1 and self._abandoned:
                self._abandoned.popleft().close()
        finally:
            self._depth -= 1
            was_interrupted = self._depth == 0 and self._restore_interrupts()
            if self._depth == 0:
                self._owner = None
            self._lock.release()
        if was_interrupted:
            raise KeyboardInterrupt

    def _hold_interrupts(self) -> None:
        """Note Ctrl-C instead of raising it. This is only done in the main thread, where Python would raise it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)
            self._holds_interrupts = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._was_interrupted = True

    def _restore_interrupts(self) -> bool:
        """Let Ctrl-C raise again; returns whether one came while the lock was held."""
        if not self._holds_interrupts:
            return False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._holds_interrupts = False
        was_interrupted, self._was_interrupted = self._was_interrupted, False
        return was_interrupted

    def close(self, steps: Closable) -> None:
        """Close a stream with the lock held. If this thread holds it already, the stream is closed at the release."""
        if self._owner == threading.get_ident():
            self._abandoned.append(steps)
            return
        with self:
            steps.close()
