"""Where the threads of a process are: a thread looks at all of them many times a second and counts what it finds.

A thread that waits is counted where it waits. The names are those of Python functions: what a function calls in C is part
of it. The sampler gets its turn when another thread releases the interpreter lock, so that long calls which keep the lock
are counted where they end.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from types import FrameType
from typing import Any

EVERY_S = 0.005
MOST_PLACES = 12
_IDLE = 0.98


class ThreadSampler:
    """Samples all other threads between `start` and `stop`."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._places: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bough-bench-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> dict[str, list[dict[str, Any]]]:
        """End sampling; returns for each thread the functions that it was in most often, with their shares.

        Threads that have waited in one place nearly all the time are left out.
        """
        self._is_stopping.set()
        self._thread.join()
        shares = {name: _shares(places) for name, places in self._places.items()}
        return {name: found for name, found in shares.items() if found[0]["share"] < _IDLE}

    def sample(self) -> None:
        """Count where each thread is now, but for the sampler's own."""
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not self._thread}
        for ident, frame in sys._current_frames().items():
            if ident in names:
                self._places[names[ident]][_place(frame)] += 1

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self.sample()
            self._is_stopping.wait(self._every_s)


def _place(frame: FrameType) -> str:
    """The function that runs, and who called it."""
    caller = frame.f_back
    return _name(frame) if caller is None else f"{_name(caller)} → {_name(frame)}"


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}"


def _shares(places: Counter[str]) -> list[dict[str, Any]]:
    total = places.total()
    return [{"place": place, "share": round(count / total, 3)} for place, count in places.most_common(MOST_PLACES)]
