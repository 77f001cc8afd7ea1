"""Tables and a plot of the reused share, by policy and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bough.errors import RequestError
from bough.replay.run import Result
from bough.replay.trace import Trace
from bough.system.distribution import install_command

NAMES = {
    "duel": "LRU ⟷ LRU-2 duel, pages",
    "lru": "leaf LRU, pages",
    "lru2": "leaf LRU-2, pages",
    "nodes": "whole nodes, oldest first",
    "copies": "copy per conversation",
    "single": "single entry",
    "belady": "offline reference (leaf Belady)",
    "placed": "recurrent: ends, branches, system",
    "placed-chat": "recurrent: those and messages",
    "spaced-512": "recurrent: every 512 tokens",
    "spaced-2048": "recurrent: every 2,048 tokens",
    "spaced-8192": "recurrent: every 8,192 tokens",
}


@dataclass(frozen=True)
class Report:
    """All results of one trace."""

    trace: Trace
    results: list[Result]

    def as_dict(self) -> dict[str, Any]:
        results = [_known_fields(result) for result in self.results]
        return {"trace": self.trace.name, "requests": len(self.trace.requests), "results": results}

    def by_policy(self) -> dict[str, list[Result]]:
        """The results of each policy, the smallest budget first."""
        found: dict[str, list[Result]] = {}
        for result in sorted(self.results, key=lambda each: each.budget):
            found.setdefault(result.policy, []).append(result)
        return {policy: found[policy] for policy in dict.fromkeys(result.policy for result in self.results)}


def _known_fields(result: Result) -> dict[str, Any]:
    """The fields of a result, without those of states if the model has none."""
    return {name: value for name, value in asdict(result).items() if value is not None}


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def make_table(report: Report) -> Table:
    """One row for each policy and one column for each budget; the last row is a cache without a limit."""
    trace, rows = report.trace, report.by_policy()
    caption = f"{len(trace.requests):,} requests, {trace.num_blocks:,} blocks of {trace.block_tokens} tokens"
    table = _table_by_budget(f"{trace.name}: prompt tokens reused, by budget", rows, caption)
    for policy, results in rows.items():
        table.add_row(NAMES[policy], *(f"{result.reused_share:.1%}" for result in results))
    table.add_section()
    table.add_row("no limit", *[f"{trace.unlimited_share():.1%}"] * (len(table.columns) - 1))
    return table


def make_state_table(report: Report) -> Table | None:
    """The cost of recurrent states in the same layout; None if no policy has any."""
    rows = {policy: results for policy, results in report.by_policy().items() if results[0].states is not None}
    if not rows:
        return None
    table = _table_by_budget(f"{report.trace.name}: bytes held that are states (states made), by budget", rows)
    for policy, results in rows.items():
        table.add_row(NAMES[policy], *(f"{result.state_share:.1%} ({result.states:,})" for result in results))
    return table


def _table_by_budget(title: str, rows: dict[str, list[Result]], caption: str | None = None) -> Table:
    """An empty table with a column for each budget."""
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("policy")
    for result in next(iter(rows.values()), []):
        table.add_column(percent(result.budget), justify="right")
    return table


def plot(reports: Sequence[Report], file: Path) -> None:
    """Write a PNG: the reused share by budget, with a line for each policy and a panel for each trace."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(f"plots need matplotlib: {install_command('bench')}") from error
    figure = Figure(figsize=(6 * len(reports), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for report, axes in zip(reports, panels, strict=True):
        _draw(report, axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _draw(report: Report, axes: Any) -> None:
    for policy, results in report.by_policy().items():
        shares = [100 * result.reused_share for result in results]
        axes.plot([result.budget for result in results], shares, marker=".", label=NAMES[policy])
    axes.axhline(100 * report.trace.unlimited_share(), color="grey", linestyle=":", label="no limit")
    budgets = sorted({result.budget for result in report.results})
    axes.set(xscale="log", xlabel="budget, of all distinct blocks", ylabel="prompt tokens reused, %")
    axes.set_xticks(budgets, [percent(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_title(report.trace.name)
    axes.grid(alpha=0.3)
