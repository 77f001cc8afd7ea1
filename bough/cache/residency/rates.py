"""Rates: what computing a token and loading a byte took lately; and the clocks that the cache goes by.

Moving averages of what was measured. What is not known yet counts as free, so that it is tried and known afterwards:
loading stops as soon as it turns out slower than computing. What was not measured for a while counts as unknown again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bough.cache.tree.state import Tier

Where = TypeVar("Where")

WEIGHT = 0.3
"""What the newest measurement counts in a moving average."""

STALE_S = 300.0
"""A rate that kept us from loading is forgotten after so many seconds: the disk may have been busy."""

BAND_TOKENS = 2048
"""Later tokens attend to more: prefill is measured for each band of positions."""

FEWEST_TOKENS = 64


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


@dataclass
class _Average:
    value: float
    measured_s: float

    def add(self, value: float, now: float) -> None:
        self.value += WEIGHT * (value - self.value)
        self.measured_s = now


class Rates:
    """Measured costs, by tier and by position."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token_s: dict[int, _Average] = {}  # seconds a token, by band
        self._byte_s: dict[Tier, _Average] = {}

    def note_prefill(self, start: int, end: int, seconds: float) -> None:
        """Tokens [start, end) were computed in so many seconds. A few alone say nothing of the rate."""
        if end - start >= FEWEST_TOKENS and seconds > 0:
            self._note(self._token_s, (start + end) // 2 // BAND_TOKENS, seconds / (end - start))

    def note_load(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """So many bytes came from a tier in so many seconds."""
        if nbytes > 0 and seconds > 0:
            self._note(self._byte_s, tier, seconds / nbytes)

    def _note(self, averages: dict[Where, _Average], where: Where, value: float) -> None:
        now = self._clock()
        known = averages.get(where)
        if known is None or now - known.measured_s > STALE_S:
            averages[where] = _Average(value, now)
        else:
            known.add(value, now)

    def byte_s(self, tier: Tier) -> float:
        """Seconds that a byte from this tier takes; 0 if that is not known."""
        known = self._byte_s.get(tier)
        return 0.0 if known is None or self._clock() - known.measured_s > STALE_S else known.value

    def measured(self) -> tuple[dict[int, float], dict[Tier, float]]:
        """Seconds a token by band, and seconds a byte by tier, as far as they are known."""
        tokens = {band: known.value for band, known in self._token_s.items()}
        return tokens, {tier: known.value for tier, known in self._byte_s.items()}

    def prefill_s(self, start: int, end: int) -> float | None:
        """Seconds that computing tokens [start, end) would take; None if nothing was computed yet."""
        if not self._token_s:
            return None
        seconds, at = 0.0, start
        while at < end:
            stop = min(end, (at // BAND_TOKENS + 1) * BAND_TOKENS)
            seconds += (stop - at) * self._nearest(at // BAND_TOKENS)
            at = stop
        return seconds

    def _nearest(self, band: int) -> float:
        return self._token_s[min(self._token_s, key=lambda known: abs(known - band))].value
