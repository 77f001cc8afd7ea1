"""A table and a plot of servers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bough.bench.machine import read_load, read_machine
from bough.bench.peers.measure import Measure
from bough.bench.peers.run import PeerReport
from bough.bench.plot import drawing


def columns(report: PeerReport) -> list[str]:
    """What is measured, a column for each server, and how far the first is ahead of each other one."""
    first, *others = [peer.name for peer in report.peers]
    return ["", "unit", first, *others, *(f"{first} ÷ {name}" for name in others)]


def rows(report: PeerReport) -> Iterator[list[str]]:
    """A row for each measure, with the best round of each server."""
    names = [peer.name for peer in report.peers]
    for measure in report.measures:
        values = [_cell(measure, name) for name in names]
        ratios = [measure.ratio(names[0], name) for name in names[1:]]
        yield [measure.name, measure.unit, *values, *("" if each is None else f"{each:.2f}×" for each in ratios)]


def _cell(measure: Measure, server: str) -> str:
    best = measure.best(server)
    if best is None:
        return "failed" if server in measure.failures else "not told"
    return f"{best:,.1f}" + ("*" if server in measure.failures else "")


def lines(report: PeerReport) -> Iterator[str]:
    """The machine with its load, and what there is to say of each server and each failure."""
    yield f"{read_machine()} · load {report.load_at_start} at the start, {read_load()} at the end"
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


def _draw(axes: Any, measure: Measure, names: Sequence[str]) -> None:
    values = [measure.best(name) or 0.0 for name in names]
    bars = axes.bar(range(len(names)), values, color=[f"C{number}" for number in range(len(names))])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_title(measure.name, fontsize=9)
    axes.set_ylabel(measure.unit + ("" if measure.is_rate else " (less is better)"), fontsize=8)
    axes.margins(y=0.15)
