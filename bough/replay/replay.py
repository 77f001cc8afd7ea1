"""Replays a trace with each policy and budget, and shows the reused share as tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bough.bench.report import drawing
from bough.cache.residency.policy import LRU, LRU2, WHOLE_NODES
from bough.replay.strategies import (
    BeladyTree,
    PlacedTree,
    ReplayCopies,
    ReplaySingleEntry,
    ReplayStrategy,
    ReplayTree,
    SpacedTree,
)
from bough.replay.trace import Trace
from bough.types import Mark


@dataclass(frozen=True)
class NamedStrategy:
    """A strategy with its name in tables and plots, made for a trace and a budget in blocks."""

    label: str
    make: Callable[[Trace, int], ReplayStrategy]


POLICIES = {
    "duel": NamedStrategy("LRU ⟷ LRU-2 duel, pages", lambda trace, budget: ReplayTree(budget)),
    "lru": NamedStrategy("leaf LRU, pages", lambda trace, budget: ReplayTree(budget, LRU)),
    "lru2": NamedStrategy("leaf LRU-2, pages", lambda trace, budget: ReplayTree(budget, LRU2)),
    "nodes": NamedStrategy("whole nodes, oldest first", lambda trace, budget: ReplayTree(budget, WHOLE_NODES)),
    "copies": NamedStrategy("copy per conversation", lambda trace, budget: ReplayCopies(budget)),
    "single": NamedStrategy("single entry", lambda trace, budget: ReplaySingleEntry(budget)),
    "belady": NamedStrategy("offline reference (leaf Belady)", lambda trace, budget: BeladyTree(budget, trace)),
    "placed": NamedStrategy("recurrent: ends, branches, system", PlacedTree),
    "placed-chat": NamedStrategy("recurrent: those and messages", partial(PlacedTree, marks=tuple(Mark))),
    "spaced-512": NamedStrategy("recurrent: every 512 tokens", partial(SpacedTree, spacing_tokens=512)),
    "spaced-2048": NamedStrategy("recurrent: every 2,048 tokens", partial(SpacedTree, spacing_tokens=2048)),
    "spaced-8192": NamedStrategy("recurrent: every 8,192 tokens", partial(SpacedTree, spacing_tokens=8192)),
}
"""The strategies by the names that the command takes. The library uses the first.

From `placed` on, the model has recurrent layers besides full attention. For such models the library works like `placed` for
prompts of ids, and like `placed-chat` for messages.
"""


@dataclass(frozen=True)
class Result:
    """The share of all prompt tokens that one replay reused, and the number of evicted blocks.

    For a model with recurrent layers also the number of states that were captured, and their share of the held bytes.
    """

    policy: str
    budget: float
    reused_share: float
    evictions: int
    states: int | None = None
    state_share: float | None = None


def replay(trace: Trace, policy: str, budget: float, on_request: Callable[[], object] = lambda: None) -> Result:
    """Replay a renumbered trace with a budget that is a share of its distinct blocks."""
    strategy = POLICIES[policy].make(trace, max(1, int(budget * trace.num_blocks)))
    reused = 0
    for request in trace.requests:
        reused += strategy.serve(request)
        on_request()
    share = reused * trace.block_tokens / max(1, trace.prompt_tokens)
    result, costs = Result(policy, budget, share, strategy.num_evicted), strategy.state_costs
    return replace(result, states=costs.num_made, state_share=costs.share) if costs else result


@dataclass(frozen=True)
class ReplayReport:
    """All results of one trace."""

    trace: Trace
    results: list[Result]

    def as_dict(self) -> dict[str, Any]:
        results = [asdict(result) for result in self.results]
        known = [{name: value for name, value in each.items() if value is not None} for each in results]
        return {"trace": self.trace.name, "requests": len(self.trace.requests), "results": known}

    def by_policy(self) -> dict[str, list[Result]]:
        """The results of each policy, the smallest budget first."""
        found: dict[str, list[Result]] = {result.policy: [] for result in self.results}
        for result in sorted(self.results, key=lambda each: each.budget):
            found[result.policy].append(result)
        return found


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def make_table(report: ReplayReport) -> Table:
    """One row for each policy and one column for each budget; the last row is a cache without a limit."""
    trace, rows = report.trace, report.by_policy()
    caption = f"{len(trace.requests):,} requests, {trace.num_blocks:,} blocks of {trace.block_tokens} tokens"
    table = _table_by_budget(f"{trace.name}: prompt tokens reused, by budget", rows, caption)
    for policy, results in rows.items():
        table.add_row(POLICIES[policy].label, *(f"{result.reused_share:.1%}" for result in results))
    table.add_section()
    table.add_row("no limit", *[f"{trace.unlimited_share():.1%}"] * (len(table.columns) - 1))
    return table


def make_state_table(report: ReplayReport) -> Table | None:
    """The cost of recurrent states in the same layout; None if no policy has any."""
    rows = {policy: results for policy, results in report.by_policy().items() if results[0].states is not None}
    if not rows:
        return None
    table = _table_by_budget(f"{report.trace.name}: bytes held that are states (states made), by budget", rows)
    for policy, results in rows.items():
        table.add_row(POLICIES[policy].label, *(f"{result.state_share:.1%} ({result.states:,})" for result in results))
    return table


def _table_by_budget(title: str, rows: dict[str, list[Result]], caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("policy")
    for result in next(iter(rows.values()), []):
        table.add_column(percent(result.budget), justify="right")
    return table


def plot(reports: Sequence[ReplayReport], file: Path) -> None:
    """Write a PNG: the reused share by budget, with a line for each policy and a panel for each trace."""
    with drawing(file, width=6 * len(reports), height=5) as figure:
        panels = figure.subplots(1, len(reports), squeeze=False)[0]
        for report, axes in zip(reports, panels, strict=True):
            _draw(report, axes)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")


def _draw(report: ReplayReport, axes: Any) -> None:
    for policy, results in report.by_policy().items():
        shares = [100 * result.reused_share for result in results]
        axes.plot([result.budget for result in results], shares, marker=".", label=POLICIES[policy].label)
    axes.axhline(100 * report.trace.unlimited_share(), color="grey", linestyle=":", label="no limit")
    budgets = sorted({result.budget for result in report.results})
    axes.set(xscale="log", xlabel="budget, of all distinct blocks", ylabel="prompt tokens reused, %")
    axes.set_xticks(budgets, [percent(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_title(report.trace.name)
    axes.grid(alpha=0.3)
