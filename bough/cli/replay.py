"""`bough replay`: replay recorded requests against the real cache, and compare policies and budgets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bough.cli.terminal.progress import make_counter
from bough.replay.cluster.report import ClusterReport, make_cluster_table
from bough.replay.cluster.simulation import BOUND, PREFILL_TOKENS_S, ROUTES, STORE_TOKENS_S, ClusterSetup, replay_cluster
from bough.replay.report import Report, make_state_table, make_table, percent, plot
from bough.replay.run import POLICIES
from bough.replay.run import replay as replay_trace
from bough.replay.trace import Trace
from bough.replay.trace_file import read_trace

ALL_ROUTES = [*ROUTES, BOUND]
MOST_REPLICAS = 1024


def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Mooncake lines or message lists, also gzipped.")
    ],
    budget: Annotated[
        str | None, typer.Option(help="Shares of all distinct blocks, separated by commas [1%,3%,10%,30%; replicas: 30%].")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(POLICIES)}, separated by commas, or all [duel].")
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Numbers of replicas, such as 4,16,64: compare ways to choose between them.")
    ] = None,
    route: Annotated[
        str, typer.Option(help=f"With replicas: some of {', '.join(ALL_ROUTES)}, separated by commas, or all.")
    ] = "all",
    each: Annotated[bool, typer.Option(help="With replicas: the budget is each one's, not that of all together.")] = False,
    load: Annotated[
        str, typer.Option(help="With replicas: what computing everything without reuse would take of them.")
    ] = "70%",
    prefill_rate: Annotated[
        float, typer.Option(min=1, help="With replicas: the tokens a second that each computes.")
    ] = PREFILL_TOKENS_S,
    store_rate: Annotated[
        float, typer.Option(min=1, help="With replicas: the tokens a second that a store brings to one that copies.")
    ] = STORE_TOKENS_S,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only so many requests from the start.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write a plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON for each trace.")] = False,
) -> None:
    """Replay recorded requests against the cache, without a model: what each policy reuses at each budget."""
    console = Console(stderr=as_json)
    if replicas is not None:
        if policy is not None or png is not None:
            raise typer.BadParameter("--policy and --png are not for --replicas, whose ways to choose are --route")
        setups = [
            ClusterSetup(number, share, each, _read_share("load", load, 100), prefill_rate, store_rate)
            for number in _read_counts(replicas)
            for share in read_budgets(budget or "30%")
        ]
        _replay_clusters([_read(file, requests) for file in traces], setups, _read_routes(route), console, as_json)
        return
    budgets, policies = read_budgets(budget or "1%,3%,10%,30%"), read_policies(policy or "duel")
    reports = []
    for file in traces:
        reports.append(_replay_all(_read(file, requests), policies, budgets, console))
        console.print(make_table(reports[-1]))
        if states := make_state_table(reports[-1]):
            console.print(states)
    if as_json:
        for report in reports:
            print(json.dumps(report.as_dict()), flush=True)
    if png is not None:
        plot(reports, png)  # last: if the plot fails, the figures are already printed
        console.print(f"plot: {png}")


def _read(file: Path, num_requests: int | None) -> Trace:
    return read_trace(file).first(num_requests).renumbered()


def read_budgets(text: str) -> list[float]:
    """Shares from text such as `1%,3%`; each is above 0 and at most 100 %."""
    return [_read_share("budget", part.strip(), 1) for part in text.split(",")]


def _read_share(name: str, text: str, most: int) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError as error:
        raise typer.BadParameter(f"the {name} {text!r} is not a percentage such as 3%") from error
    if not 0 < share <= most:
        raise typer.BadParameter(f"the {name} {text!r} is not above 0% and at most {100 * most}%")
    return share


def _read_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MOST_REPLICAS for part in parts):
        raise typer.BadParameter(f"the replicas {text!r} are not numbers from 1 to {MOST_REPLICAS:,}, separated by commas")
    return [int(part) for part in parts]


def _read_routes(text: str) -> list[str]:
    names = ALL_ROUTES if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ALL_ROUTES:
            raise typer.BadParameter(f"the route {name!r} is not one of {', '.join(ALL_ROUTES)}")
    return names


def _replay_clusters(
    traces: list[Trace], setups: list[ClusterSetup], routes: list[str], console: Console, as_json: bool
) -> None:
    for trace in traces:
        for setup in setups:
            results = []
            with make_counter(console) as progress:
                for name in routes:
                    task = progress.add_task(f"{name}, {setup.num_replicas} replicas", total=len(trace.requests))
                    results.append(replay_cluster(trace, setup, name, partial(progress.advance, task)))
                    progress.remove_task(task)
            report = ClusterReport(trace, setup, results)
            console.print(make_cluster_table(report))
            if as_json:
                print(json.dumps(report.as_dict()), flush=True)


def read_policies(text: str) -> list[str]:
    """Names of policies, separated by commas; `all` stands for all of them."""
    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(f"the policy {name!r} is not one of {', '.join(POLICIES)}")
    return names


def _replay_all(trace: Trace, policies: list[str], budgets: list[float], console: Console) -> Report:
    results = []
    with make_counter(console) as progress:
        for policy in policies:
            for budget in budgets:
                task = progress.add_task(f"{policy}, {percent(budget)}", total=len(trace.requests))
                results.append(replay_trace(trace, policy, budget, partial(progress.advance, task)))
                progress.remove_task(task)
    return Report(trace, results)
