"""Gaps between the tokens of streamed answers: which of them belong to a window of time, and what they come to.

Pure: times are seconds of one monotonic clock, and are passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class GapWindow:
    """A part of a run, [start_s, end_s]."""

    start_s: float
    end_s: float


def gaps_in(window: GapWindow, arrivals: Sequence[float]) -> list[float]:
    """The gaps between tokens of one answer that lie in a window, or reach into it from before or out of it at its end."""
    return [later - earlier for earlier, later in pairwise(arrivals) if later > window.start_s and earlier < window.end_s]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class GapFigures:
    """The gaps of all answers in one window, or in several."""

    longest_ms: float
    p99_ms: float
    median_ms: float
    num_gaps: int

    @classmethod
    def of(cls, gaps_s: Sequence[float]) -> GapFigures:
        """Raises ValueError if there are no gaps: then nothing was measured."""
        if not gaps_s:
            raise ValueError("no answer had two tokens in the window")
        longest_s, p99_s, median_s = max(gaps_s), percentile(gaps_s, 0.99), statistics.median(gaps_s)
        return cls(_ms(longest_s), _ms(p99_s), _ms(median_s), len(gaps_s))


@dataclass(frozen=True)
class GapCase:
    """One disturbance: the gaps meanwhile beside those of the same answers just before.

    `note` says in a few words what was done meanwhile, `facts` all of it.
    """

    part: str
    name: str
    quiet: GapFigures
    disturbed: GapFigures
    note: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times longer the longest gap was than without the disturbance."""
        return self.disturbed.longest_ms / self.quiet.longest_ms


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
