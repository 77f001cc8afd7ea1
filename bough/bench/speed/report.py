"""A run of the speed benchmarks with its surroundings: the machine, its load before and after, the engines; and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.bench.machine import read_load, read_machine
from bough.bench.plot import drawing
from bough.bench.speed.figures import SpeedReport
from bough.bench.speed.variants import Variant, describe_variants


class Surroundings:
    """The machine, the engines, and the load from the beginning of a run to its end."""

    def __init__(self) -> None:
        self._machine = read_machine()
        self.load_at_start = read_load()

    def describe(self, variants: Sequence[Variant]) -> dict[str, Any]:
        """All of it as plain data; call it at the end."""
        first = variants[0].runtime
        return {
            "model": first.files.name if first.files else "random weights",
            "machine": self._machine.as_dict(),
            "load": {"start": self.load_at_start, "end": read_load()},
            "engines": describe_variants(variants),
        }

    def lines(self, variants: Sequence[Variant]) -> list[str]:
        """The same for people, one line for each fact."""
        told = describe_variants(variants)
        threads = " / ".join(dict.fromkeys(each.get("threads", "?") for each in told.values()))
        return [
            f"{self._machine} · {threads} threads · load {self.load_at_start} at the start, {read_load()} at the end",
            *(f"{name}: {_describe_weights(each)}" for name, each in told.items()),
        ]


def _describe_weights(told: dict[str, str]) -> str:
    """What an engine says of its weights and of the code that computes with them."""
    facts = [told[name] for name in ("weights", "dtype") if name in told] or ["unknown"]
    return " · ".join(
        [facts[0], *(f"{name} {told[name]}" for name in ("kernels", "attention", "batching") if name in told)]
    )


def plot_speed(report: SpeedReport, file: Path) -> None:
    """Tokens per second by size, a line by variant and number of rows. Raises RequestError if it cannot be written."""
    unit = "lanes" if report.benchmark == "decode" else "tokens of a run"
    with drawing(file) as figure:
        axes = figure.subplots()
        for weights, rows in dict.fromkeys((each.weights, each.rows) for each in report.figures):
            line = [each for each in report.figures if (each.weights, each.rows) == (weights, rows)]
            sizes, speeds = [each.size for each in line], [each.tokens_per_s for each in line]
            axes.plot(sizes, speeds, marker="o", label=f"{weights}, {rows:,} rows before")
        axes.set(xlabel=unit, ylabel="tokens per second", xscale="log", title=f"bough bench {report.benchmark}")
        sizes = sorted({each.size for each in report.figures})
        axes.set_xticks(sizes, [f"{each:,}" for each in sizes])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
