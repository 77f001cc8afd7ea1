"""Waiting for what another thread or process does, for tests: `wait_until` is the one place that looks again and again.

Where there is something to wait on, an event, a condition or a future, wait on that instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BOUND_S = 60.0
"""After so long something counts as stuck: far more than a busy machine needs."""

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.25  # looks become rarer: one may cost the process that is waited for


def wait_until(holds: Callable[[], object], bound_s: float = BOUND_S, *, describe: Callable[[], str] = lambda: "") -> None:
    """Wait until something is true, however long this machine takes; fail if it is stuck, with what `describe` says.

    On an event loop, run it in a thread: `await asyncio.to_thread(wait_until, …)`.
    """
    stuck_at_s, look_s = time.monotonic() + bound_s, _FIRST_LOOK_S
    while not holds():
        assert time.monotonic() < stuck_at_s, f"waited {bound_s:.0f} s in vain {describe()}"
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)


class WatchedLock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_awaited = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if (has_it := self._lock.acquire(blocking=False)) or not blocking:
            return has_it
        self.is_awaited.set()
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
