"""The command `replicas`: for each number of replicas a table with a row for each way to choose between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.replicas.simulation import (
    BOUND,
    PREFILL_TOKENS_S,
    ROUTES,
    STORE_TOKENS_S,
    ClusterResult,
    ClusterSetup,
    replay_cluster,
)
from bough.cli import options
from bough.cli.bench import Json, read_numbers
from bough.cli.replay import read_budgets, read_share
from bough.cli.terminal.progress import make_counter
from bough.replay.trace import Trace
from bough.replay.trace_file import read_trace

ALL_ROUTES = [*ROUTES, BOUND]


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


def replicas(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Mooncake lines or message lists, also gzipped.")
    ],
    counts: Annotated[str, typer.Option("--replicas", help="Numbers of replicas, separated by commas.")] = "4,16,64",
    budget: Annotated[str, typer.Option(help="Shares of all distinct blocks, separated by commas.")] = "30%",
    route: Annotated[str, typer.Option(help=f"Some of {', '.join(ALL_ROUTES)}, separated by commas, or all.")] = "all",
    each: Annotated[bool, typer.Option(help="The budget is each replica's, not that of all together.")] = False,
    load: Annotated[str, typer.Option(help="The load if everything were computed without reuse.")] = "70%",
    prefill_rate: Annotated[
        float, typer.Option(min=1, help="The tokens that each replica computes in a second.")
    ] = PREFILL_TOKENS_S,
    store_rate: Annotated[
        float, typer.Option(min=1, help="The tokens that a store brings to a replica in a second.")
    ] = STORE_TOKENS_S,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only the first N requests.", metavar="N")] = None,
    as_json: Json = False,
) -> None:
    """Replay recorded requests over several replicas: what each way to choose between them reuses, and how soon."""
    console, routes = Console(stderr=as_json), options.read_names(route, ALL_ROUTES, "route")
    setups = [
        ClusterSetup(number, share, each, read_share("load", load, 100), prefill_rate, store_rate)
        for number in read_numbers(counts)
        for share in read_budgets(budget)
    ]
    for trace in [read_trace(file).first(requests).renumbered() for file in traces]:
        for setup in setups:
            report = ClusterReport(trace, setup, list(_replay_all(trace, setup, routes, console)))
            console.print(make_cluster_table(report))
            if as_json:
                print(json.dumps(report.as_dict()), flush=True)


def _replay_all(trace: Trace, setup: ClusterSetup, routes: list[str], console: Console) -> Iterator[ClusterResult]:
    with make_counter(console) as progress:
        for name in routes:
            task = progress.add_task(f"{name}, {setup.num_replicas} replicas", total=len(trace.requests))
            yield replay_cluster(trace, setup, name, partial(progress.advance, task))
            progress.remove_task(task)


def make_cluster_table(report: ClusterReport) -> Table:
    """The share that each way reuses, also as a share of the bound, and the times to the first token."""
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
