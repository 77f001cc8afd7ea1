"""The two clocks of the cache: one that never goes back, for order in memory, and the wall's, for what is on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Clock:
    """`now` orders uses in memory; `wall` is the time that is written to disk."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def to_wall(self, at: float) -> float:
        """A time of `now` as the wall's clock shows it."""
        return self.wall() - (self.now() - at)

    @property
    def offset(self) -> float:
        """What is added to a time of the wall's clock to get one of `now`."""
        return self.now() - self.wall()
