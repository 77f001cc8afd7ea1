"""Tables of replays over several replicas: for each number of them, one row for each way to choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bough.replay.cluster.simulation import BOUND, ClusterResult, ClusterSetup
from bough.replay.trace import Trace


@dataclass(frozen=True)
class ClusterReport:
    """The results of one trace with one number of replicas and one budget."""

    trace: Trace
    setup: ClusterSetup
    results: list[ClusterResult]

    def as_dict(self) -> dict[str, Any]:
        setup = {
            "trace": self.trace.name,
            "requests": len(self.trace.requests),
            "replicas": self.setup.num_replicas,
            "budget": self.setup.budget,
            "is_budget_each": self.setup.is_budget_each,
            "load": self.setup.load,
            "prefill_tokens_s": self.setup.prefill_tokens_s,
            "store_tokens_s": self.setup.store_tokens_s,
        }
        return setup | {"results": [result.as_dict() for result in self.results]}

    @property
    def bound(self) -> ClusterResult | None:
        return next((result for result in self.results if result.route == BOUND), None)


def make_cluster_table(report: ClusterReport) -> Table:
    """What each way reuses, also as a share of the bound, and how long first tokens take."""
    trace, setup = report.trace, report.setup
    each = setup.tree_blocks(trace, setup.num_replicas) * trace.block_tokens
    title = f"{trace.name}: {setup.num_replicas} replicas of {each:,} tokens each"
    caption = f"{len(trace.requests):,} requests; computing all without reuse would be a load of {setup.load:.0%}"
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("route", no_wrap=True)
    for column in ("reused", "bound", "first, ms", "p95", "predicted", "busy", "busiest"):
        table.add_column(column, justify="right")
    for result in report.results:
        table.add_row(result.route, *_cells(result, report.bound))
    return table


def _cells(result: ClusterResult, bound: ClusterResult | None) -> list[str]:
    return [
        f"{result.reused_share:.1%}",
        f"{result.reused_share / bound.reused_share:.0%}" if bound is not None and bound.reused_share else "–",
        _milliseconds(result.first_token_s),
        _milliseconds(result.p95_s),
        _milliseconds(result.predicted_s),
        f"{result.busy_share:.0%}",
        f"{result.imbalance:.1f}×",
    ]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
