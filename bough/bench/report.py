"""Tables and a plot of the switching workload."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from bough.bench.plot import drawing
from bough.bench.switch import StrategyResult, Turn

_COLUMNS = ("later turns", "first turns", "reused", "possible", "total", "kept for later")
_NAMES = {"tree": "tree", "copies": "copy per conversation", "single": "single entry", "none": "no cache"}


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


def plot(results: dict[str, StrategyResult], file: Path) -> None:
    """Time to first token by turn, one line for each strategy, as a PNG. Raises RequestError if it cannot be written."""
    with drawing(file) as figure:
        axes = figure.subplots()
        for name, result in results.items():
            turns = range(1, len(result.turns) + 1)
            axes.plot(turns, [1000 * turn.first_token_s for turn in result.turns], marker=".", label=_NAMES[name])
        axes.set(xlabel="request", ylabel="time to first token, ms", yscale="log", title="Conversations taking turns")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
