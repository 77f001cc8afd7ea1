"""What one thing came to on each server: the values of all rounds, the best of them, and ratios. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measure:
    """Values by server. With `is_rate` more is better, otherwise less; `failures` says why a server has too few."""

    name: str
    unit: str
    is_rate: bool
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, server: str, value: float) -> None:
        self.values.setdefault(server, []).append(value)

    def best(self, server: str) -> float | None:
        """The best round, or None if there is none."""
        values = self.values.get(server)
        return (max(values) if self.is_rate else min(values)) if values else None

    def ratio(self, server: str, other: str) -> float | None:
        """How many times better a server is than another by their best rounds; above 1 it is ahead."""
        ours, theirs = self.best(server), self.best(other)
        if not ours or not theirs:
            return None
        return ours / theirs if self.is_rate else theirs / ours

    def as_dict(self, first: str) -> dict[str, Any]:
        ratios = {name: self.ratio(first, name) for name in self.values if name != first}
        return {
            "name": self.name,
            "unit": self.unit,
            "more_is_better": self.is_rate,
            "best": {name: _round(self.best(name)) for name in self.values},
            "median": {name: _round(statistics.median(values)) for name, values in self.values.items()},
            "values": {name: [_round(value) for value in values] for name, values in self.values.items()},
            f"{first}_against": {name: _round(ratio) for name, ratio in ratios.items()},
            "prompt_tokens": self.prompt_tokens,
            "failures": self.failures,
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
