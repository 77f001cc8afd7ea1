"""The engine's thread of a loaded model: a worker that starts when it is first needed, and is closed once.

Ctrl-C may come at any moment in the main thread, and a finalizer may run in any; neither leaves a worker half started, or a
lock that is never released. In a forked process there is no such thread: everything is refused, and closing does nothing.
"""

from __future__ import annotations

import _thread
import os
import threading
from abc import ABC, abstractmethod

from bough.errors import EngineError, RequestError
from bough.scheduling.worker import Worker, require_process


class EngineOwner(ABC):
    """A loaded model with the thread that alone uses its engine. Close it, however its use ends."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._starting = threading.Lock()
        self._process_id = os.getpid()
        self._is_closed = False

    @abstractmethod
    def _make_worker(self) -> Worker: ...

    @abstractmethod
    def _release(self) -> None:
        """Free the model. The worker calls it before it ends; if none was made, `close` does."""

    @property
    def worker(self) -> Worker:
        """The engine's thread, started at the first use. Raises RequestError after `close` and in a forked process."""
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
        require_process(self._process_id)
        if self._is_closed:
            raise RequestError("the runner is closed")

    def _start(self) -> None:
        with self._starting:
            if self._worker is None and not self._is_closed:
                self._worker = self._make_worker()

    def close(self) -> None:
        """End the requests, save the tree, release the model, and wait. Does nothing twice, or in a forked process."""
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
