"""`bough bench decode`: the time of a decode step of one or several lanes, and of a run of prompt tokens on one lane.

It measures the engine alone, with different weights in turns and without sampling. Every lane has a prompt of its own, and
every variant gets the same tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bough.bench.report import drawing
from bough.bench.variants import PreparedLane, Variant, evaluate_in_runs
from bough.bench.workload import random_prompts
from bough.engines.contract import Engine
from bough.errors import RequestError

_UNTIMED_STEPS = 1  # after another variant has run, the first step is slower

Unit = Literal["lanes", "tokens"]
"""The unit of a figure's size: lanes of a step, or tokens of a run."""


@dataclass(frozen=True)
class DecodeSetup:
    """The sizes to measure: steps of numbers of lanes and runs of numbers of tokens, after numbers of rows."""

    lanes: Sequence[int] = (1, 2, 4, 8)
    tokens: Sequence[int] = (64, 512)
    depths: Sequence[int] = (0, 500)
    steps: int = 32
    rounds: int = 5

    @property
    def num_cases(self) -> int:
        return (len(self.lanes) + len(self.tokens)) * len(self.depths)


@dataclass(frozen=True)
class Figure:
    """The times of one variant at one size, where a lane has `rows` tokens before.

    `round_ms` has for each round the mean time of a step, or the time of a run. Each computes `size` tokens.
    """

    weights: str
    unit: Unit
    rows: int
    size: int
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
        return 1000 * self.size / self.smallest_ms


@dataclass
class DecodeReport:
    """All figures of a run."""

    setup: DecodeSetup
    figures: list[Figure] = field(default_factory=list)

    def ratio(self, figure: Figure) -> float:
        """How many times quicker than the first variant at the same size, by the quickest rounds."""
        size = (figure.unit, figure.rows, figure.size)
        first = next(each for each in self.figures if (each.unit, each.rows, each.size) == size)
        return first.smallest_ms / figure.smallest_ms

    def as_dict(self) -> dict[str, Any]:
        return {"setup": asdict(self.setup), "figures": [self._as_dict(each) for each in self.figures]}

    def _as_dict(self, figure: Figure) -> dict[str, Any]:
        return {
            "weights": figure.weights,
            "rows": figure.rows,
            figure.unit: figure.size,
            "smallest_ms": round(figure.smallest_ms, 3),
            "median_ms": round(figure.median_ms, 3),
            "tokens_per_s": round(figure.tokens_per_s, 1),
            "ratio": round(self.ratio(figure), 3),
            "round_ms": [round(each, 3) for each in figure.round_ms],
        }


def measure_decode(variants: Sequence[Variant], setup: DecodeSetup) -> Iterator[list[Figure]]:
    """For each size the figures of all variants, which take turns round by round."""
    for depth in setup.depths:
        with ExitStack() as stack:
            prepared = {each.weights: stack.enter_context(_prepare(each.engine, depth, setup)) for each in variants}
            cases: list[tuple[Unit, int]] = [*(("lanes", n) for n in setup.lanes), *(("tokens", n) for n in setup.tokens)]
            for unit, count in cases:
                times: dict[str, list[float]] = {each.weights: [] for each in variants}
                for _ in range(1 + setup.rounds):
                    for each in variants:
                        times[each.weights].append(_time(each.engine, prepared[each.weights], setup, unit, count))
                yield [Figure(name, unit, depth, count, tuple(ms[1:])) for name, ms in times.items()]  # the first warms up


def _time(engine: Engine, lanes: Sequence[PreparedLane], setup: DecodeSetup, unit: Unit, count: int) -> float:
    """The milliseconds of a step of this many lanes, or of a run of this many tokens."""
    if unit == "lanes":
        return 1000 * _time_steps(engine, lanes[:count], setup.steps)
    return 1000 * _time_run(engine, lanes[0], count)


@contextmanager
def _prepare(engine: Engine, depth: int, setup: DecodeSetup) -> Iterator[list[PreparedLane]]:
    """Lanes with `depth` rows each, and room for the steps; the first has room for the longest run."""
    steps, longest = setup.steps + _UNTIMED_STEPS if setup.lanes else 0, max(setup.tokens, default=0)
    for room, unit in ((steps, "steps"), (longest, "tokens")):
        if depth + room > engine.context_tokens:
            raise RequestError(
                f"{depth:,} rows and {room:,} {unit} do not fit into the context of {engine.context_tokens:,} tokens"
            )
    prompts = random_prompts(range(engine.vocab_size), depth, max(setup.lanes, default=1))
    rooms = [max(steps, longest), *[steps] * (len(prompts) - 1)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(PreparedLane(engine, prompt, room)))
            for prompt, room in zip(prompts, rooms, strict=True)
        ]


def _time_steps(engine: Engine, prepared: Sequence[PreparedLane], steps: int) -> float:
    for each in prepared:
        each.put_back()
    lanes = [each.lane for each in prepared]
    tokens = random_prompts(range(engine.vocab_size), len(lanes), steps + _UNTIMED_STEPS, seed=1)
    for ids in tokens[:_UNTIMED_STEPS]:
        engine.step(lanes, ids)
    engine.synchronize()
    started_s = time.perf_counter()
    for ids in tokens[_UNTIMED_STEPS:]:
        engine.step(lanes, ids)
        engine.synchronize()
    return (time.perf_counter() - started_s) / steps


def _time_run(engine: Engine, prepared: PreparedLane, count: int) -> float:
    ids = random_prompts(range(engine.vocab_size), count, 1, seed=2)[0]
    prepared.put_back()
    engine.synchronize()
    started_s = time.perf_counter()
    evaluate_in_runs(engine, prepared.lane, ids)
    engine.synchronize()
    return time.perf_counter() - started_s


def plot_decode(report: DecodeReport, file: Path) -> None:
    """Tokens per second by size, a line by variant and number of rows. Raises RequestError if it cannot be written."""
    units = list(dict.fromkeys(each.unit for each in report.figures))
    with drawing(file, width=8 * len(units)) as figure:
        for axes, unit in zip(figure.subplots(1, len(units), squeeze=False)[0], units, strict=True):
            figures = [each for each in report.figures if each.unit == unit]
            for weights, rows in dict.fromkeys((each.weights, each.rows) for each in figures):
                line = [each for each in figures if (each.weights, each.rows) == (weights, rows)]
                sizes, speeds = [each.size for each in line], [each.tokens_per_s for each in line]
                axes.plot(sizes, speeds, marker="o", label=f"{weights}, {rows:,} rows before")
            what = "lanes of a step" if unit == "lanes" else "tokens of a run"
            axes.set(xlabel=what, ylabel="tokens per second", xscale="log", title="bough bench decode")
            sizes = sorted({each.size for each in figures})
            axes.set_xticks(sizes, [f"{each:,}" for each in sizes])
            axes.set_xticks([], minor=True)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
