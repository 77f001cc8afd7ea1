"""The health of the store: how it is counted, and how long it is left alone after a failure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bough.cache.disk.errors import Warnings

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0


@dataclass
class StoreCounts:
    """What was sent and read, and what was not.

    `sent` and `already_there` are objects that this process had and the store lacked, or did not lack. `refreshed` ones
    were sent again because they were old or damaged, or because a list has grown. `dropped` ones were not sent because too
    much waited, `gone` ones because their content had left memory, `refused` ones because they were cleared lately.
    """

    sent: int = 0
    sent_bytes: int = 0
    already_there: int = 0
    refreshed: int = 0
    dropped: int = 0
    gone: int = 0
    refused: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    not_found: int = 0
    errors: int = 0
    swept: int = 0
    swept_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class Health:
    """Whether the store answers. After a failure it is left alone for 1 to 60 s. Any thread may call."""

    def __init__(self, counts: StoreCounts, clock: Callable[[], float], warn: Callable[[str], None]) -> None:
        self.problem = ""
        self._counts = counts
        self._clock = clock
        self._warnings = Warnings(warn)
        self._lock = threading.Lock()
        self._until = 0.0
        self._back_off_s = FIRST_BACK_OFF_S

    @property
    def is_backing_off(self) -> bool:
        return self._clock() < self._until

    @property
    def back_off_left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    def fail(self, what: str, error: Exception) -> None:
        """Note that the store has failed, and leave it alone for a while. The first time in a row, say it."""
        with self._lock:
            self._counts.errors += 1
            is_new, self.problem = not self.problem, f"{what}: {error}"
            if not self.is_backing_off:  # else it is another call of those that were under way
                self._until = self._clock() + self._back_off_s
                self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)
        if is_new:
            self._warnings.say("failure", f"the store: {self.problem}; answers go on without it")

    def succeed(self) -> None:
        """The store has answered."""
        if self.problem:
            with self._lock:
                self.problem, self._until, self._back_off_s = "", 0.0, FIRST_BACK_OFF_S

    def say(self, kind: str, message: str) -> None:
        """Pass a warning on that was not passed on lately."""
        self._warnings.say(kind, message)
