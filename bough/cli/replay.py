"""`bough replay`: replay recorded requests against the real cache, and compare policies and budgets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bough.cli import options
from bough.cli.terminal.progress import make_counter
from bough.replay.replay import POLICIES, ReplayReport, make_state_table, make_table, percent, plot
from bough.replay.replay import replay as replay_trace
from bough.replay.trace import Trace
from bough.replay.trace_file import read_trace


def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Mooncake lines or message lists, also gzipped.")
    ],
    budget: Annotated[str, typer.Option(help="Shares of all distinct blocks, separated by commas.")] = "1%,3%,10%,30%",
    policy: Annotated[str, typer.Option(help=f"Some of {', '.join(POLICIES)}, separated by commas, or all.")] = "duel",
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only so many requests from the start.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write a plot.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON for each trace.")] = False,
) -> None:
    """Replay recorded requests against the cache, without a model: what each policy reuses at each budget."""
    console, budgets = Console(stderr=as_json), read_budgets(budget)
    policies = options.read_names(policy, POLICIES, "policy")
    reports = []
    for file in traces:
        reports.append(_replay_all(read_trace(file).first(requests).renumbered(), policies, budgets, console))
        console.print(make_table(reports[-1]))
        if states := make_state_table(reports[-1]):
            console.print(states)
    if as_json:
        for report in reports:
            print(json.dumps(report.as_dict()), flush=True)
    if png is not None:
        plot(reports, png)  # last: if the plot fails, the figures are already printed
        console.print(f"plot: {png}")


def read_budgets(text: str) -> list[float]:
    """Shares from text such as `1%,3%`; each is above 0 and at most 100 %."""
    return [read_share("budget", part.strip(), 1) for part in text.split(",")]


def read_share(name: str, text: str, most: int) -> float:
    """A share from text such as `3%`; above 0 and at most `most`."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError as error:
        raise typer.BadParameter(f"the {name} {text!r} is not a percentage such as 3%") from error
    if not 0 < share <= most:
        raise typer.BadParameter(f"the {name} {text!r} is not above 0% and at most {100 * most}%")
    return share


def _replay_all(trace: Trace, policies: list[str], budgets: list[float], console: Console) -> ReplayReport:
    results = []
    with make_counter(console) as progress:
        for policy in policies:
            for budget in budgets:
                task = progress.add_task(f"{policy}, {percent(budget)}", total=len(trace.requests))
                results.append(replay_trace(trace, policy, budget, partial(progress.advance, task)))
                progress.remove_task(task)
    return ReplayReport(trace, results)
