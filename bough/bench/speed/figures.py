"""What a measurement of speed comes to: times of rounds, tokens per second, and ratios between variants. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The times of one variant at one size.

    `size` is a number of lanes or of tokens, `rows` how many tokens a lane has before. `round_ms` has for each round the
    mean time of a step, or the time of a run, which computes `tokens` tokens.
    """

    weights: str
    rows: int
    size: int
    tokens: int
    round_ms: tuple[float, ...]

    @property
    def smallest_ms(self) -> float:
        return min(self.round_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.round_ms)

    @property
    def tokens_per_s(self) -> float:
        """In the quickest round."""
        return 1000 * self.tokens / self.smallest_ms


@dataclass
class SpeedReport:
    """All figures of a benchmark, what the engines say of themselves, and the machine with its load."""

    benchmark: str
    figures: list[Figure] = field(default_factory=list)
    setup: dict[str, Any] = field(default_factory=dict)

    def ratio(self, figure: Figure) -> float:
        """How many times quicker than the first variant at the same size, by the quickest rounds."""
        return self._first(figure).smallest_ms / figure.smallest_ms

    def _first(self, figure: Figure) -> Figure:
        return next(each for each in self.figures if (each.rows, each.size) == (figure.rows, figure.size))

    def as_dict(self) -> dict[str, Any]:
        return {"benchmark": self.benchmark, **self.setup, "figures": [self._as_dict(each) for each in self.figures]}

    def _as_dict(self, figure: Figure) -> dict[str, Any]:
        return {
            "weights": figure.weights,
            "rows": figure.rows,
            "lanes" if self.benchmark == "decode" else "tokens": figure.size,
            "smallest_ms": round(figure.smallest_ms, 3),
            "median_ms": round(figure.median_ms, 3),
            "tokens_per_s": round(figure.tokens_per_s, 1),
            "ratio": round(self.ratio(figure), 3),
            "round_ms": [round(each, 3) for each in figure.round_ms],
        }


def collect(rows: int, size: int, tokens: int, times: dict[str, list[float]]) -> list[Figure]:
    """One figure for each variant, from the seconds of its rounds."""
    return [Figure(name, rows, size, tokens, _milliseconds(seconds)) for name, seconds in times.items()]


def _milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * each for each in seconds)
