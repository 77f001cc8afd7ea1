"""Long work in slices, some of which the engine's thread runs between two turns of the scheduler.

The work is a generator that returns the result. At each `yield` it may be interrupted; requests go on before its next
slice, and the tree may have changed by then.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from bough.cache.steps import Steps
from bough.errors import QueueFull

log = logging.getLogger(__name__)
Result = TypeVar("Result")

SLICE_S = 0.002  # about the time of a slice; a step of the work that takes longer is not interrupted
MAX_WAITING = 64  # the most that wait or run


class SlicedWork(Generic[Result]):
    """Work that waits or runs, and the future of its result. Cancelling the future closes the work."""

    def __init__(self, start: Callable[[], Steps[Result]]) -> None:
        self.future: Future[Result] = Future()  # not "running" before the end, so that it can be cancelled until then
        self._start = start
        self._steps: Steps[Result] | None = None
        self._is_settled = False
        self._settles = threading.Lock()

    def advance(self, deadline_s: float, clock: Callable[[], float]) -> bool:
        """Work until the deadline; return whether the work is over. Its error goes to the future."""
        try:
            self._steps = self._steps or self._start()
            while not self.future.done():
                next(self._steps)
                if clock() >= deadline_s and not self.future.done():
                    return False
            self._steps.close()
            self._settle(lambda: None)
        except StopIteration as end:
            result = end.value
            self._settle(lambda: self.future.set_result(result))
        except BaseException as error:
            if self.future.done():
                log.exception("work failed while it was closed, and nobody waits for it")
            self.fail(error)
        return True

    def fail(self, error: BaseException) -> None:
        """Set the future to an error. The engine's thread closes the work later."""
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, give: Callable[[], None]) -> None:
        """Set the future unless it is set: the watchdog and the engine's thread may both call this."""
        with self._settles:
            is_first, self._is_settled = not self._is_settled, True
        if is_first and self.future.set_running_or_notify_cancel():
            give()

    @property
    def is_unwanted(self) -> bool:
        """Whether it has not begun, and was cancelled or failed."""
        return self._steps is None and self.future.done()


class Slices:
    """The work that waits for its next slice. Other threads add to it, and the engine's thread advances it."""

    def __init__(self) -> None:
        self.waiting: deque[SlicedWork[Any]] = deque()  # changed only with `_changes` held
        self._changes = threading.Lock()

    def add(self, work: SlicedWork[Any]) -> None:
        """Queue work. Raises QueueFull if `MAX_WAITING` wait already."""
        with self._changes:
            if len(self.waiting) >= MAX_WAITING:
                self.waiting = deque(each for each in self.waiting if not each.is_unwanted)
            if len(self.waiting) >= MAX_WAITING:
                raise QueueFull(len(self.waiting))
            self.waiting.append(work)

    def run(self, clock: Callable[[], float], seconds: float) -> None:
        """Run slices of the queued work, in turn, for this time; at least one."""
        end_s = clock() + seconds
        self._run_one(clock, end_s)
        while self.waiting and clock() < end_s:
            self._run_one(clock, end_s)

    def _run_one(self, clock: Callable[[], float], end_s: float) -> None:
        """Run the next slice; its work then waits behind the others."""
        with self._changes:
            work = self._next_wanted()
        if work is not None and not work.advance(min(clock() + SLICE_S, end_s), clock):
            with self._changes:
                self.waiting.append(work)

    def _next_wanted(self) -> SlicedWork[Any] | None:
        while self.waiting:
            work = self.waiting.popleft()
            if not work.is_unwanted:
                return work
        return None

    def fail_all(self, error: Exception) -> None:
        with self._changes:
            waiting = tuple(self.waiting)
        for work in waiting:
            work.fail(error)
