"""Tables and a plot of the switching workload, and a warning about a busy machine."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from rich.table import Table

from bough.bench.switch import StrategyResult, Turn
from bough.errors import RequestError

_COLUMNS = ("later turns", "first turns", "reused", "possible", "total", "kept for later")
_NAMES = {"tree": "tree", "copies": "copy per conversation", "single": "single entry", "none": "no cache"}


def load_warning() -> str | None:
    """A warning if the machine is busy, because the times are then unreliable."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return (
        f"the machine is busy (load {load:.1f} on {cores} cores): the times below are noisy" if load > 0.5 * cores else None
    )


def strategy_table(results: dict[str, StrategyResult]) -> Table:
    """One row for each strategy: times to the first token, shares, seconds, bytes."""
    table = Table(title="time to first token (median), by strategy", title_justify="left")
    table.add_column("strategy")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, result in results.items():
        figures = result.as_dict()
        table.add_row(
            _NAMES[name],
            f"{figures['later_ttft_ms']:,.0f} ms",
            f"{figures['first_ttft_ms']:,.0f} ms",
            f"{figures['reused_share']:.1%}",
            f"{figures['possible_share']:.1%}",
            f"{figures['total_s']:.1f} s",
            f"{figures['bytes'] / 2**20:,.1f} MiB",
        )
    return table


def turn_table(results: dict[str, StrategyResult]) -> Table:
    """One row for each turn: its counts with the tree, and the times of all strategies."""
    table = Table(title="turn by turn", title_justify="left")
    for column in ("turn", "chat", "prompt", "cached", "computed"):
        table.add_column(column, justify="right")
    others = [name for name in results if name != "tree"]
    for name in ("tree", *others):
        table.add_column(f"first token, {_NAMES[name]}", justify="right")
    for number, turn in enumerate(results["tree"].turns):
        others_turns = [results[name].turns[number] for name in others]
        table.add_row(*_turn_cells(turn), *(f"{1000 * each.first_token_s:,.0f} ms" for each in [turn, *others_turns]))
    return table


def _turn_cells(turn: Turn) -> list[str]:
    counts = (turn.prompt_tokens, turn.cached_tokens, turn.computed_tokens)
    return [str(turn.turn + 1), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[turn.conversation % 26], *map("{:,}".format, counts)]


def require_matplotlib() -> None:
    """Raise RequestError, with the command to install it, if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise RequestError(f"plots need matplotlib: pip install 'bough[bench]' ({error})") from error


def plot(results: dict[str, StrategyResult], file: Path) -> None:
    """Time to first token by turn, one line for each strategy, as a PNG. Raises RequestError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, result in results.items():
        turns = range(1, len(result.turns) + 1)
        axes.plot(turns, [1000 * turn.first_token_s for turn in result.turns], marker=".", label=_NAMES[name])
    axes.set(xlabel="request", ylabel="time to first token, ms", yscale="log", title="Conversations taking turns")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise RequestError(f"the plot cannot be written: {error}") from error
