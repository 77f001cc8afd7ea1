"""The engine's thread: it alone runs the scheduler, and whatever else touches the tree while requests run.

Others hand it requests (`submit`) and calls (`call`), which it takes between two turns. What costs the more the larger the
tree is, so that it would hold up the requests, has a bounded share of the time while any run: looks at the tree (`look`),
and the figures that it notes for those who do not wait (`snapshot`). A watchdog fails the requests of a step that does not
end, and the calls behind it, so that nobody waits for ever; when the step ends after all, the worker goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bough.errors import EngineError, EngineStuck, QueueFull, ShuttingDown
from bough.generate.job import Job
from bough.generate.scheduler import Scheduler

log = logging.getLogger(__name__)
Result = TypeVar("Result")

IDLE_S = 60.0
"""So often an idle worker looks after what may have expired."""

_SNAPSHOT_SHARE = 20  # taking figures costs at most one part in so many of the time
_SNAPSHOT_S = 0.5  # and happens no oftener than this while requests run
MOST_LOOKS = 64  # that may wait
_LOOK_SHARE = 5  # looks cost at most one part in so many of the time while requests run
_WATCH_S = 1.0


@dataclass(frozen=True)
class Limits:
    """How many requests may wait for a lane, and how long one step of the engine may take."""

    queue: int = 64
    stuck_s: float = 300.0


@dataclass(eq=False)
class _Call(Generic[Result]):
    """Something to run between two turns, and what becomes of it."""

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


def _make_way(waiting: Sequence[Job], tenant: str) -> bool:
    """Refuse the newest request of the tenant with the most that wait, if this one then still has no more; False if not."""
    if not tenant:
        return False
    counts = Counter(job.tenant for job in waiting if job.tenant)
    most, number = max(counts.items(), key=lambda item: item[1], default=("", 0))
    newest = [job for job in reversed(waiting) if job.tenant == most]
    return number > counts[tenant] + 1 and any(job.give_way(QueueFull(len(waiting))) for job in newest)


class Worker:
    """A thread that runs a scheduler until `close`."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine_lock: AbstractContextManager[None],
        limits: Limits,
        *,
        take_stats: Callable[[], dict[str, Any]],
        on_idle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._engine_lock = engine_lock
        self._take_stats = take_stats
        self._on_idle = on_idle
        self._clock = clock
        self._inbox: deque[Job | _Call[Any]] = deque()  # changed only by who holds `_wakes`
        self._looks: deque[_Call[Any]] = deque()  # likewise
        self._look_from_s = 0.0  # not before this time the next look, while requests run
        self._wakes = threading.Condition()
        self._is_closing = False
        self._busy_since: float | None = None
        self._is_stuck = False
        self._snapshot: dict[str, Any] = take_stats()
        self._snapshot_s = self._snapshot_due_s = 0.0  # when it was taken, and when it may be taken again
        self._is_snapshot_old = False
        self._thread = threading.Thread(target=self._run, name="bough-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="bough-watchdog", daemon=True)
        self._thread.start()
        self._watchdog.start()

    @property
    def is_stuck(self) -> bool:
        """Whether a step runs longer than any may."""
        return self._is_stuck

    @property
    def num_waiting(self) -> int:
        """Requests that have no lane yet."""
        return len(self._waiting())

    def _waiting(self) -> list[Job]:
        """The requests that have no lane yet, the newest last."""
        handed = [each for each in tuple(self._inbox) if isinstance(each, Job)]  # copied at once: others change it
        return [job for job in (*tuple(self.scheduler.waiting), *handed) if not job.is_over]

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def snapshot(self) -> dict[str, Any]:
        """The figures of the cache as they were a moment ago, and those of the queue now; never waits."""
        return {**self._snapshot, "queue": self.num_waiting, "running": self.num_running}

    def submit(self, job: Job) -> None:
        """Hand over a request; its listener hears the rest. Raises ShuttingDown, EngineStuck or QueueFull.

        When the queue is full, the newest request of the tenant with the most there makes way for one with fewer.
        """
        with self._wakes:
            self._require_open()
            waiting = self._waiting()
            if len(waiting) >= self.limits.queue + self.scheduler.num_free_lanes and not _make_way(waiting, job.tenant):
                raise QueueFull(len(waiting))
            job.submitted_s = self._clock()
            self._inbox.append(job)
            self._wakes.notify()

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run something between two turns, such as a change of the tree. Raises ShuttingDown or EngineStuck."""

        def run() -> Result:
            self.scheduler.put_off_check()
            return work()

        return self._hand_over(self._inbox, _Call(run, Future()))

    def look(self, work: Callable[[], Result]) -> Future[Result]:
        """Run something that looks at the whole tree, one such between two turns, and seldom enough while requests run.

        Raises ShuttingDown, EngineStuck, or QueueFull if very many wait for that already.
        """
        if len(self._looks) >= MOST_LOOKS:
            self._forget_cancelled_looks()
        if len(self._looks) >= MOST_LOOKS:
            raise QueueFull(len(self._looks))
        return self._hand_over(self._looks, _Call(work, Future()))

    def _forget_cancelled_looks(self) -> None:
        with self._wakes:
            wanted = [look for look in self._looks if not look.future.cancelled()]
            self._looks.clear()
            self._looks.extend(wanted)

    def _hand_over(self, queue: deque[Any], call: _Call[Result]) -> Future[Result]:
        with self._wakes:
            self._require_open()
            queue.append(call)
            self._wakes.notify()
        return call.future

    def close(self) -> None:
        """End what is running, with what it has computed kept, and wait for the thread. A second call does nothing.

        Raises EngineStuck if a step does not end: then the thread ends when the step does.
        """
        with self._wakes:
            self._is_closing = True
            self._wakes.notify()
        while self._thread.is_alive():
            self._thread.join(_WATCH_S)
            if self._is_stuck and self._thread.is_alive():
                raise EngineStuck("the engine has been busy with one step for too long; it is not waited for")
        self._watchdog.join()

    def _require_open(self) -> None:
        if self._is_closing:
            raise ShuttingDown("the model is being unloaded; try again")
        if self._is_stuck:
            raise EngineStuck("the engine has been busy with one step for too long; nothing new is taken until it ends")

    def _run(self) -> None:
        while True:
            with self._wakes:
                if not (self._inbox or self._looks or self.scheduler.has_work or self._is_closing):
                    self._wakes.wait(self._idle_s())
                is_closing = self._is_closing  # if so, nothing comes any more, and all that came is taken below
            with self._engine_lock:
                self._take_handed()
                self._take_looks(is_closing)
                self._busy_since = self._clock()
                self._turn(is_closing)
                self._busy_since = None
            if is_closing:
                return

    def _take_handed(self) -> None:
        """Take what was handed over until now. Each call is a step of its own for the watchdog, which sees all the rest."""
        for _ in range(len(self._inbox)):
            with self._wakes:
                each = self._inbox.popleft() if self._inbox else None  # the watchdog may have taken it
                if isinstance(each, Job):
                    self.scheduler.add(each)
            if isinstance(each, _Call):
                self._busy_since = self._clock()
                each.run()

    def _take_looks(self, is_closing: bool) -> None:
        """Run the next look, unless requests run and the last one was only just now for what it cost; all at the end."""
        while self._looks and (is_closing or not self.scheduler.has_work or self._clock() >= self._look_from_s):
            with self._wakes:
                look = self._looks.popleft() if self._looks else None  # the watchdog may have taken it
            if look is not None and look.future.cancelled():
                continue  # whoever asked has gone
            if look is not None:
                started_s = self._busy_since = self._clock()
                look.run()
                now = self._clock()
                self._look_from_s = now + (_LOOK_SHARE - 1) * (now - started_s)
            if not is_closing:
                return

    def _turn(self, is_closing: bool) -> None:
        """One turn; a mistake of ours ends the requests, and never the thread."""
        try:
            if is_closing:
                self.scheduler.fail_all(ShuttingDown("the model was unloaded; ask again"))
            elif self.scheduler.has_work:
                self.scheduler.turn()
            else:
                self._on_idle()
            self._refresh_snapshot()
        except Exception as error:
            log.exception("a turn of the scheduler failed by a mistake of ours")
            self.scheduler.fail_all(EngineError(f"{type(error).__name__}: {error}"))

    def _refresh_snapshot(self) -> None:
        """Take the figures anew if it is time for that; otherwise an idle worker does so a little later."""
        started_s = self._clock()
        is_early = started_s < self._snapshot_due_s
        if is_early or (self.scheduler.has_work and started_s < self._snapshot_s + _SNAPSHOT_S):
            self._is_snapshot_old = True
            return
        self._snapshot = self._take_stats()
        self._is_snapshot_old = False
        self._snapshot_s = now = self._clock()
        self._snapshot_due_s = now + _SNAPSHOT_SHARE * (now - started_s)

    def _idle_s(self) -> float:
        """How long an idle worker waits for something to do."""
        return max(0.0, self._snapshot_due_s - self._clock()) if self._is_snapshot_old else IDLE_S

    def _watch(self) -> None:
        """Look every second whether a step takes too long."""
        while self._thread.is_alive():
            self._thread.join(min(_WATCH_S, self.limits.stuck_s / 4))
            since = self._busy_since
            is_stuck = since is not None and self._clock() - since > self.limits.stuck_s
            if is_stuck and not self._is_stuck:
                self._is_stuck = True
                log.error("a step of the engine takes longer than %.0f s: its requests are given up", self.limits.stuck_s)
            if is_stuck:
                self._give_up()
            self._is_stuck = is_stuck

    def _give_up(self) -> None:
        """Tell the clients; the engine's thread cleans up when the step ends."""
        with self._wakes:
            handed = [*self._inbox, *self._looks]
            self._inbox.clear()
            self._looks.clear()
        for each in [*handed, *list(self.scheduler.waiting), *list(self.scheduler.running)]:
            each.fail(EngineStuck(f"a step of the engine takes longer than {self.limits.stuck_s:.0f} s"))
