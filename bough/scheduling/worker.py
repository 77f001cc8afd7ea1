"""The engine's thread: it alone runs the scheduler and everything else that touches the tree while requests run.

It takes requests (`submit`) and calls (`call`) of other threads between two turns of the scheduler. Work whose cost grows
with the tree runs in slices (`run_in_slices`), which get a bounded share of the time while requests run. Statistics are
taken now and then, and read without waiting (`snapshot`). Requests that were cancelled before a call was made have ended
when it runs.

A watchdog fails the requests of a step that does not end, and the calls behind it. If the step ends after all, the worker
continues. Threads do not survive a fork: in a child process a worker refuses everything, and closing it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bough.cache.steps import Steps, run_at_once
from bough.errors import EngineError, EngineStuck, QueueFull, RequestError, ShuttingDown
from bough.scheduling.job import QueuedJob, TurnScheduler
from bough.scheduling.slices import SLICE_S, SlicedWork, Slices

log = logging.getLogger(__name__)
Result = TypeVar("Result")

IDLE_S = 60.0  # between two removals of expired state by an idle worker
STUCK_S = 300.0  # after which a step of the engine counts as stuck, and its requests fail
_SNAPSHOT_S = 0.5  # between two statistics while requests run
_SLICE_SHARE = 5  # slices take at most 1/5 of the time while requests run
_SLICES_S = 0.01  # and at most about this between two turns, so that tokens are not delayed noticeably
_WATCH_S = 1.0  # between two checks of the watchdog
_LOADING_S = 0.002  # between two looks at reads from disk, while there is nothing to compute


@dataclass(frozen=True)
class Limits:
    """The most requests that wait for a lane, and the longest time of one step of the engine."""

    queue: float = math.inf
    stuck_s: float = STUCK_S


@dataclass(eq=False)
class _Call(Generic[Result]):
    work: Callable[[], Result]
    future: Future[Result]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _refuse_newest(waiting: Sequence[QueuedJob[Any]], tenant: str) -> bool:
    """Refuse the newest request of the tenant with the most, if it has at least two more. True if it was."""
    if not tenant:
        return False
    counts = Counter(job.tenant for job in waiting if job.tenant)
    most, number = max(counts.items(), key=lambda item: item[1], default=("", 0))
    newest = [job for job in reversed(waiting) if job.tenant == most]
    return number > counts[tenant] + 1 and any(job.refuse(QueueFull(len(waiting))) for job in newest)


def require_process(process_id: int) -> None:
    """Raise RequestError if this is not the process that loaded the model, but a fork of it."""
    if os.getpid() != process_id:
        raise RequestError(
            f"the model was loaded by the process {process_id}, and this is {os.getpid()}: "
            "a forked process must load it for itself"
        )


class Worker:
    """A thread that runs a scheduler until `close`.

    When idle it calls `on_idle` about once a minute, and again at once as long as that returns True. At its end it calls
    `on_close`, which releases the resources that it alone has used.
    """

    def __init__(
        self,
        scheduler: TurnScheduler,
        limits: Limits,
        *,
        take_stats: Callable[[], dict[str, Any]],
        on_idle: Callable[[], bool],
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._take_stats = take_stats
        self._on_idle = on_idle
        self._on_close = on_close
        self._closing_error: BaseException | None = None
        self._process_id = os.getpid()
        self._clock = clock
        self._inbox: deque[QueuedJob[Any] | _Call[Any]] = deque()  # changed only with `_lock` held
        self._slices = Slices()
        self._slices_may_take_s = SLICE_S  # while requests run; negative after a long step
        self._slices_ended_s = 0.0
        self._lock = threading.RLock()  # entered itself, never by `_wakes`: Ctrl-C could leave that locked for ever
        self._wakes = threading.Condition(self._lock)
        self._is_closing = False
        self._has_ended = False
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # has an item when the thread has ended
        self._busy_since: float | None = None
        self._is_stuck = False
        self._snapshot: dict[str, Any] = take_stats()
        self._snapshot_s = 0.0  # when it was taken
        self._has_more_to_tidy = False
        self._thread = threading.Thread(target=self._run, name="bough-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="bough-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    @property
    def is_stuck(self) -> bool:
        """Whether the current step takes longer than the limit."""
        return self._is_stuck

    @property
    def num_waiting(self) -> int:
        return len(self._waiting())

    def _waiting(self) -> list[QueuedJob[Any]]:
        """The requests that have no lane yet, the newest last."""
        queued = [each for each in tuple(self._inbox) if not isinstance(each, _Call)]  # a copy: other threads change it
        return [job for job in (*tuple(self.scheduler.waiting), *queued) if not job.is_over]

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def snapshot(self) -> dict[str, Any]:
        """Recent statistics of the cache, and the current ones of the queue. Never waits."""
        return {**self._snapshot, "queue": self.num_waiting, "running": self.num_running}

    def submit(self, job: QueuedJob[Any]) -> None:
        """Queue a request. Raises ShuttingDown, EngineStuck or QueueFull.

        When the queue is full, the newest request of the tenant with the most waiting requests is refused in favour of one
        by a tenant with fewer.
        """
        self.require_own_process()
        with self._lock:
            self._require_open()
            if self.limits.queue < math.inf:
                waiting, most = self._waiting(), self.limits.queue + self.scheduler.num_free_lanes
                if len(waiting) >= most and not _refuse_newest(waiting, job.tenant):
                    raise QueueFull(len(waiting))
            job.submitted_s = self._clock()
            self._inbox.append(job)
            self._wakes.notify()

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run a function between two turns; on the engine's thread itself, at once. Raises ShuttingDown or EngineStuck."""

        def run() -> Result:
            self.scheduler.sweep()
            self.scheduler.postpone_check()
            return work()

        if self._is_own_thread:
            return _done(work())
        self.require_own_process()
        waiting = _Call(run, Future())
        with self._lock:
            self._require_open()
            self._inbox.append(waiting)
            self._wakes.notify()
        return waiting.future

    def run_in_slices(self, work: Callable[[], Steps[Result]]) -> Future[Result]:
        """Run long work in slices between turns, in up to 1/5 of the time while requests run.

        The generator may be interrupted at each `yield`; what it returns is the result. Several take turns. Cancelling the
        future closes the generator. An idle or closing worker runs it to the end. Raises ShuttingDown, EngineStuck, or
        QueueFull if too many wait already. On the engine's thread itself it runs to the end at once.
        """
        if self._is_own_thread:
            return _done(run_at_once(work))
        self.require_own_process()
        sliced = SlicedWork(work)
        with self._lock:
            self._require_open()
            self._slices.add(sliced)
            self._wakes.notify()
        return sliced.future

    def close(self) -> None:
        """End the running requests, keep what they have computed, and wait for the thread. A second call does nothing.

        Raises EngineStuck if a step does not end. The thread then ends when the step does. Raises what `on_close` raises.
        """
        if os.getpid() != self._process_id:
            return
        self.close_soon()
        while not self._has_ended:
            with contextlib.suppress(queue.Empty):  # not by joining: if Ctrl-C interrupts that, Python 3.11 and 3.12 take
                self._ended.put(self._ended.get(timeout=_WATCH_S))  # the thread for one that has ended
            if self._is_stuck and not self._has_ended:
                raise EngineStuck("the engine has been busy with one step for too long; it is not waited for")
        self._thread.join()
        self._watchdog.join()
        error, self._closing_error = self._closing_error, None
        if error is not None:
            raise error

    def close_soon(self) -> None:
        """Close without waiting. Any thread may call it at any time, and so may a finalizer."""
        if os.getpid() == self._process_id:
            with self._lock:  # which its own thread may hold already
                self._is_closing = True
                self._wakes.notify()

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def require_own_process(self) -> None:
        """Raise RequestError after a fork. Checked before any lock is taken: in the child it may stay held for ever."""
        require_process(self._process_id)

    def _require_open(self) -> None:
        if self._is_closing:
            raise ShuttingDown("the model is being unloaded; try again")
        if self._is_stuck:
            raise EngineStuck("the engine has been busy with one step for too long; nothing new is taken until it ends")

    def _run(self) -> None:
        try:
            self._run_turns()
        finally:
            self._has_ended = True
            self._ended.put(None)

    def _run_turns(self) -> None:
        while True:
            with self._lock:
                if not (self._inbox or self._is_closing):
                    self._wait()
                is_closing = self._is_closing  # then nothing new is queued, and the queue is emptied below
            self._take_queued()
            self._run_slices(is_alone=not self.scheduler.has_work)
            self._busy_since = self._clock()
            self._turn(is_closing)
            while is_closing and self._slices.waiting:
                self._run_slices(is_alone=True)
            self._busy_since = None
            if is_closing:
                try:
                    self._on_close()
                except BaseException as error:
                    self._closing_error = error
                return

    def _wait(self) -> None:
        """Wait for work, or a moment if all requests wait for the disk. Needs the lock."""
        if self.scheduler.is_only_loading:
            self._wakes.wait(_LOADING_S)
        elif not (self._slices.waiting or self.scheduler.has_work):
            self._wakes.wait(0 if self._has_more_to_tidy else IDLE_S)

    def _take_queued(self) -> None:
        """Take all queued requests, and run all queued calls. The watchdog times each call as a step of its own."""
        for _ in range(len(self._inbox)):
            with self._lock:
                each = self._inbox.popleft() if self._inbox else None  # the watchdog may have taken it
                if each is not None and not isinstance(each, _Call):
                    self.scheduler.add(each)
            if isinstance(each, _Call):
                self._busy_since = self._clock()
                each.run()

    def _run_slices(self, *, is_alone: bool) -> None:
        """Run slices for their unused share of the time, without requests at least one. The watchdog times it."""
        now = self._busy_since = self._clock()
        gained_s = (now - self._slices_ended_s) / (_SLICE_SHARE - 1)
        may_take_s = min(_SLICES_S, self._slices_may_take_s + gained_s)
        if is_alone:
            may_take_s = max(may_take_s, SLICE_S)
        if may_take_s > 0 and self._slices.waiting:
            self._slices.run(self._clock, may_take_s)
        self._slices_ended_s = self._clock()
        self._slices_may_take_s = may_take_s - (self._slices_ended_s - now)

    def _turn(self, is_closing: bool) -> None:
        """Run one turn of the scheduler. A bug in it ends the requests, but not the thread."""
        try:
            if is_closing:
                self.scheduler.fail_all(ShuttingDown("the model was unloaded; ask again"))
            elif self.scheduler.has_work:
                self.scheduler.turn()
            else:
                self._has_more_to_tidy = self._on_idle()
            now = self._clock()
            if not self.scheduler.has_work or now >= self._snapshot_s + _SNAPSHOT_S:
                self._snapshot, self._snapshot_s = self._take_stats(), now
        except Exception as error:
            log.exception("a turn of the scheduler failed by a mistake of ours")
            self.scheduler.fail_all(EngineError(f"{type(error).__name__}: {error}"))

    def _watch(self) -> None:
        while self._thread.is_alive():
            self._thread.join(min(_WATCH_S, self.limits.stuck_s / 4))
            since = self._busy_since
            is_stuck = since is not None and self._clock() - since > self.limits.stuck_s
            if is_stuck and not self._is_stuck:
                self._is_stuck = True
                log.error("a step of the engine takes longer than %.0f s: its requests fail", self.limits.stuck_s)
            if is_stuck:
                self._fail_waiting()
            self._is_stuck = is_stuck

    def _fail_waiting(self) -> None:
        """Fail all requests and calls. The engine's thread cleans up when the step ends."""
        with self._lock:
            queued = list(self._inbox)
            self._inbox.clear()
        error = EngineStuck(f"a step of the engine takes longer than {self.limits.stuck_s:.0f} s")
        for each in [*queued, *list(self.scheduler.waiting), *list(self.scheduler.running)]:
            each.fail(error)
        self._slices.fail_all(error)
