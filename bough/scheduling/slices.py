"""Long work in slices, of which the engine's thread does some between two turns of the scheduler.

The work is a generator: at each `yield` it may be interrupted, and the requests go on before its next slice. The tree may
have changed by then. What it returns is the result.
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

SLICE_S = 0.002
"""About how long a slice takes. A step of the work that takes longer is not interrupted."""

MAX_WAITING = 64  # the most that may wait or be under way


class SlicedWork(Generic[Result]):
    """Work under way, and the future of its result. The work is closed where it stands when the future is cancelled."""

    def __init__(self, start: Callable[[], Steps[Result]]) -> None:
        self.future: Future[Result] = Future()  # not "running" before the end, so that it can be cancelled until then
        self._start = start
        self._steps: Steps[Result] | None = None
        self._is_settled = False
        self._settles = threading.Lock()

    def advance(self, deadline_s: float, clock: Callable[[], float]) -> bool:
        """Work until a moment; returns whether the work is over. Its error goes to the future."""
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
        """Tell the error to who waits. The engine's thread closes the work when it comes to it."""
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, give: Callable[[], None]) -> None:
        """Give the outcome to the future, unless it has one: the watchdog and the engine's thread may both come here."""
        with self._settles:
            is_first, self._is_settled = not self._is_settled, True
        if is_first and self.future.set_running_or_notify_cancel():
            give()

    @property
    def is_unwanted(self) -> bool:
        """Whether it has not begun, and nobody waits for it."""
        return self._steps is None and self.future.done()


class Slices:
    """The work that waits for its next slice, in turn. Other threads add to it, and the engine's thread advances it."""

    def __init__(self) -> None:
        self._waiting: deque[SlicedWork[Any]] = deque()  # changed only with `_changes` held
        self._changes = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: SlicedWork[Any]) -> None:
        """Queue work. Raises QueueFull if `MAX_WAITING` wait already."""
        with self._changes:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting = deque(each for each in self._waiting if not each.is_unwanted)
            if len(self._waiting) >= MAX_WAITING:
                raise QueueFull(len(self._waiting))
            self._waiting.append(work)

    def run(self, clock: Callable[[], float], seconds: float) -> None:
        """Run slices of all that waits, in turn, for so long; at least one."""
        end_s = clock() + seconds
        self._run_one(clock, end_s)
        while self._waiting and clock() < end_s:
            self._run_one(clock, end_s)

    def _run_one(self, clock: Callable[[], float], end_s: float) -> None:
        """Run the next slice; its work then waits behind the others."""
        with self._changes:
            work = self._next_wanted()
        if work is not None and not work.advance(min(clock() + SLICE_S, end_s), clock):
            with self._changes:
                self._waiting.append(work)

    def _next_wanted(self) -> SlicedWork[Any] | None:
        while self._waiting:
            work = self._waiting.popleft()
            if not work.is_unwanted:
                return work
        return None

    def fail_all(self, error: Exception) -> None:
        """Tell an error to all who wait."""
        with self._changes:
            waiting = tuple(self._waiting)
        for work in waiting:
            work.fail(error)
