"""The engine's thread of a loaded model: a worker that starts when it is first needed, and is closed once.

Ctrl-C may come at any moment in the main thread, and a finalizer may run in any; neither leaves a worker half started, or a
lock that is never released. In a forked process there is no such thread: everything is refused, and closing does nothing.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable

from bough.errors import EngineError, RequestError
from bough.scheduling.worker import Worker


class EngineThread:
    """Makes the worker of a model, and closes it. `release` is called in its place if it was never made."""

    def __init__(self, make_worker: Callable[[], Worker], release: Callable[[], None]) -> None:
        self._make_worker = make_worker
        self._release = release
        self._worker: Worker | None = None
        self._starting = threading.Lock()
        self._process_id = os.getpid()
        self._is_closed = False

    @property
    def worker(self) -> Worker:
        """The worker, which is started now if it was not before. Raises RequestError after `close` and in a fork."""
        if self._worker is None:
            self.require_open()
            starter = threading.Thread(target=self._start, name="bough-start")  # which Ctrl-C does not interrupt
            starter.start()
            starter.join()
        if self._worker is None:
            self.require_open()  # it was closed meanwhile
            raise EngineError("the engine's thread could not be started")
        return self._worker

    def require_open(self) -> None:
        """Raise RequestError if the model is closed, or was loaded by the process of which this is a fork."""
        if os.getpid() != self._process_id:
            raise RequestError(
                f"the model was loaded by the process {self._process_id}, and this is {os.getpid()}: "
                "a forked process must load it for itself"
            )
        if self._is_closed:
            raise RequestError("the runner is closed")

    def _start(self) -> None:
        with self._starting:
            if self._worker is None and not self._is_closed:
                self._worker = self._make_worker()

    def close(self) -> None:
        """End what runs, and wait until the model is released. A second call does nothing."""
        if os.getpid() != self._process_id:
            return
        with self._starting:
            worker, was_closed, self._is_closed = self._worker, self._is_closed, True
        if worker is not None:
            worker.close()
        elif not was_closed:
            self._release()

    def close_soon(self) -> None:
        """Close without waiting. A finalizer may call this, so no lock is taken that its thread may hold already."""
        was_closed, self._is_closed = self._is_closed, True
        if self._worker is not None:
            self._worker.close_soon()
        elif not was_closed and os.getpid() == self._process_id:
            _thread.start_new_thread(self._release, ())
