"""`bough bench peers`: all workloads on all servers in turns, and their results as a table and a plot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bough.bench.peers.client import Peer, PeerError
from bough.bench.peers.workloads import (
    PeerCase,
    PeerSetup,
    SwitchRun,
    Texts,
    make_cases,
    measure_tokens_per_word,
    run_switching,
)
from bough.bench.report import drawing
from bough.errors import RequestError

OnStep = Callable[[str], None]
"""Called with the name of what was just measured."""


@dataclass
class PeerMeasure:
    """The values of all rounds by server. With `is_rate` more is better, otherwise less is.

    `failures` says why a server has too few.
    """

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


@dataclass
class PeerReport:
    """The measures of all servers. The first server is the one that the others are compared with."""

    peers: Sequence[Peer]
    setup: PeerSetup
    measures: list[PeerMeasure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        first = self.peers[0].name
        return {
            "servers": [{"name": p.name, "url": p.url, "model": p.model, "notes": p.notes} for p in self.peers],
            "setup": asdict(self.setup),
            "measures": [each.as_dict(first) for each in self.measures],
        }


def count_steps(setup: PeerSetup) -> int:
    """How often `on_step` is called."""
    return setup.rounds * len(make_cases(setup)) + setup.switch.turns * setup.switch.conversations


def measure_peers(peers: Sequence[Peer], setup: PeerSetup, run: str, on_step: OnStep = lambda name: None) -> PeerReport:
    """Run every workload; a server that fails in one is left out of the rest of it. `run` makes the texts new."""
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise RequestError(f"two servers have one name among {', '.join(names)}: give them names, as in NAME=URL")
    for peer in peers:
        peer.stop_at_s = time.perf_counter() + setup.limit_s
    report = PeerReport(peers, setup)
    texts = Texts(run, _warm_up(peers))
    for case in make_cases(setup):
        report.measures.append(_measure_case(peers, case, texts, setup.rounds, on_step))
    report.measures += _switching_measures(run_switching(peers, setup.switch, run, lambda: on_step("switching")))
    return report


def _warm_up(peers: Sequence[Peer]) -> float:
    """Ask every server once, since first requests are slow; returns the tokens of a word as the first one counts."""
    found: list[float] = []
    for peer in peers:
        try:
            found.append(measure_tokens_per_word(peer))
        except PeerError as error:
            peer.note(f"failed at first: {error}")
    if not found:
        raise PeerError("no server answers: " + "; ".join(note for peer in peers for note in peer.notes))
    return found[0]


def _measure_case(peers: Sequence[Peer], case: PeerCase, texts: Texts, rounds: int, on_step: OnStep) -> PeerMeasure:
    measure = PeerMeasure(case.name, case.unit, case.is_rate)
    for number in range(rounds):
        text = texts.make(case.context_tokens, f"{number} {case.name}")
        for peer in peers if number % 2 == 0 else [*reversed(peers)]:
            if peer.name not in measure.failures:
                try:
                    found = case.measure(peer, text)
                except PeerError as error:
                    measure.failures[peer.name] = str(error)
                    continue
                measure.add(peer.name, found.value)
                if found.prompt_tokens is not None:
                    measure.prompt_tokens[peer.name] = found.prompt_tokens
        on_step(case.name)
    return measure


def _switching_measures(runs: dict[str, SwitchRun]) -> list[PeerMeasure]:
    first = PeerMeasure("switching: first token of later turns", "ms", is_rate=False)
    cached = PeerMeasure("switching: cached", "%", is_rate=True)
    total = PeerMeasure("switching: all turns", "s", is_rate=False)
    for name, run in runs.items():
        if run.failure:
            for measure in (first, cached, total):
                measure.failures[name] = run.failure
        elif run.first_token_ms is not None:
            first.add(name, run.first_token_ms)
            total.add(name, run.total_s)
            if run.cached_share is not None:
                cached.add(name, 100 * run.cached_share)
    return [first, cached, total]


def columns(report: PeerReport) -> list[str]:
    """The heads of the table: measure, unit, each server, and how far the first is ahead of each other one."""
    first, *others = [peer.name for peer in report.peers]
    return ["", "unit", first, *others, *(f"{first} ÷ {name}" for name in others)]


def rows(report: PeerReport) -> Iterator[list[str]]:
    """A row for each measure, with the best round of each server."""
    names = [peer.name for peer in report.peers]
    for measure in report.measures:
        values = [_cell(measure, name) for name in names]
        ratios = [measure.ratio(names[0], name) for name in names[1:]]
        yield [measure.name, measure.unit, *values, *("" if each is None else f"{each:.2f}×" for each in ratios)]


def _cell(measure: PeerMeasure, server: str) -> str:
    best = measure.best(server)
    if best is None:
        return "failed" if server in measure.failures else "not told"
    return f"{best:,.1f}" + ("*" if server in measure.failures else "")


def lines(report: PeerReport) -> Iterator[str]:
    """The notes on each server and each failure."""
    for peer in report.peers:
        yield f"{peer.name}: {peer.url}, model {peer.model}"
        yield from (f"{peer.name} {note}" for note in peer.notes)
    failed: dict[str, list[str]] = {}
    for measure in report.measures:
        for failure in measure.failures.values():
            failed.setdefault(failure, []).append(measure.name)
    yield from (f"failed: {', '.join(names)} ({failure})" for failure, names in failed.items())


def plot_peers(report: PeerReport, file: Path) -> None:
    """A small bar chart for each measure, a bar for each server. Raises RequestError if it cannot be written."""
    drawn = [measure for measure in report.measures if measure.values]
    across = min(3, len(drawn))
    down = -(-len(drawn) // across)
    with drawing(file, width=3.6 * across, height=2.6 * down) as figure:
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for axes, measure in zip(grid, drawn, strict=False):
            _draw(axes, measure, [peer.name for peer in report.peers])
        for axes in grid[len(drawn) :]:
            axes.set_axis_off()


def _draw(axes: Any, measure: PeerMeasure, names: Sequence[str]) -> None:
    values = [measure.best(name) or 0.0 for name in names]
    bars = axes.bar(range(len(names)), values, color=[f"C{number}" for number in range(len(names))])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_title(measure.name, fontsize=9)
    axes.set_ylabel(measure.unit + ("" if measure.is_rate else " (less is better)"), fontsize=8)
    axes.margins(y=0.15)
