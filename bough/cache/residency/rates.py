"""Rates: what computing a token and loading a byte took lately; and the clocks of the cache.

Moving averages of measurements. An unknown rate counts as free, so that it is tried and known afterwards: loading stops as
soon as it turns out slower than computing. A rate that was not measured for a while is unknown again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bough.cache.tree.state import Tier, page_ranges

Where = TypeVar("Where")

WEIGHT = 0.3
"""Of the newest measurement in a moving average."""

STALE_S = 300.0
"""A rate that made loading look slow is forgotten after this time: the disk may have been busy."""

BAND_TOKENS = 2048
"""Later tokens attend to more: prefill is measured for each band of positions."""

FEWEST_TOKENS = 64


@dataclass
class Clock:
    """`now` orders uses in memory; `wall` is the time that is written to disk."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def to_wall(self, at: float) -> float:
        """A time of `now` as time of day."""
        return self.wall() - (self.now() - at)

    @property
    def offset(self) -> float:
        """Added to a time of `wall`, it gives one of `now`."""
        return self.now() - self.wall()


@dataclass(frozen=True)
class _Average:
    value: float
    measured_s: float


class Rates:
    """Measured costs, by tier and by position."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token_s: dict[int, _Average] = {}  # seconds a token, by band
        self._byte_s: dict[Tier, _Average] = {}

    def note_prefill(self, start: int, end: int, seconds: float) -> None:
        """Learn from computing tokens [start, end), unless they are too few to show a rate."""
        if end - start >= FEWEST_TOKENS and seconds > 0:
            self._note(self._token_s, (start + end) // 2 // BAND_TOKENS, seconds / (end - start))

    def note_load(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """Learn from reading bytes of a tier."""
        if nbytes > 0 and seconds > 0:
            self._note(self._byte_s, tier, seconds / nbytes)

    def _note(self, averages: dict[Where, _Average], where: Where, value: float) -> None:
        now, known = self._clock(), averages.get(where)
        if known is not None and now - known.measured_s <= STALE_S:
            value = known.value + WEIGHT * (value - known.value)
        averages[where] = _Average(value, now)

    def byte_s(self, tier: Tier) -> float:
        """Seconds for a byte from this tier; 0 if that is not known."""
        known = self._byte_s.get(tier)
        return 0.0 if known is None or self._clock() - known.measured_s > STALE_S else known.value

    def measured(self) -> tuple[dict[int, float], dict[Tier, float]]:
        """Seconds per token by band, and seconds per byte by tier, as far as they are known."""
        tokens = {band: known.value for band, known in self._token_s.items()}
        return tokens, {tier: known.value for tier, known in self._byte_s.items()}

    def prefill_s(self, start: int, end: int) -> float | None:
        """Seconds to compute tokens [start, end); None if nothing was computed yet."""
        if not self._token_s:
            return None
        return sum((stop - at) * self._token_s_near(at // BAND_TOKENS) for at, stop in page_ranges(start, end, BAND_TOKENS))

    def _token_s_near(self, band: int) -> float:
        return self._token_s[min(self._token_s, key=lambda known: abs(known - band))].value
