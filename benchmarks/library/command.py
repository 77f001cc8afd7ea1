"""The command `library`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.library.forks import ForkFigures, ForkSetup, measure_forks
from benchmarks.library.together import (
    WAYS,
    LibraryRound,
    TogetherSetup,
    Way,
    WayFigures,
    count_equal_answers,
    measure_together,
)
from bough.cli.bench import BenchReport, Json, Model
from bough.runner import load

_MIB = 2**20
_NAMES = {"threads": "threads", "coroutines": "coroutines", "http": "HTTP clients"}


def library(
    model: Model = None,
    clients: Annotated[int, typer.Option(min=1, help="Threads, coroutines and HTTP clients that ask at once.")] = 12,
    lanes: Annotated[int, typer.Option(min=1, help="Lanes of the model.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each way in a block.")] = 3,
    blocks: Annotated[int, typer.Option(min=1, help="How often the library and the server are loaded, in turns.")] = 2,
    forks: Annotated[int, typer.Option(min=2, help="Forks of one chat.")] = 64,
    prefix: Annotated[int, typer.Option(min=16, help="Tokens of the chat that is forked.")] = 2000,
    as_json: Json = False,
) -> None:
    """Threads and coroutines in the library, against HTTP clients of a server; then many forks of one chat."""
    report, measured = BenchReport("library", as_json), list[LibraryRound]()
    setup = TogetherSetup(clients, lanes, tokens, rounds=rounds, blocks=blocks)
    with report.counting("together", setup.num_rounds) as count:
        for each in measure_together(model, setup):
            measured.append(each)
            count(each.way)
    figures = {way: WayFigures.of([each for each in measured if each.way == way]) for way in WAYS}
    num_equal = count_equal_answers(measured)
    with report.console.status("forks"), load(model, disk=0, lanes=lanes) as runner:
        forked = measure_forks(runner, ForkSetup(forks, prefix))
        engine = runner.describe()
    _print_together(report, setup, figures, num_equal)
    _print_forks(report, forked)
    report.finish(
        {
            "setup": asdict(setup) | engine,
            "together": {way: asdict(each) for way, each in figures.items()},
            "equal_answers": num_equal,
            "forks": asdict(forked) | {"prefixes_computed": round(forked.prefixes_computed, 3)},
        }
    )


def _print_together(report: BenchReport, setup: TogetherSetup, figures: dict[Way, WayFigures], num_equal: int) -> None:
    http = figures["http"].tokens_per_s
    rows = [
        (
            f"{setup.clients} {_NAMES[way]}",
            f"{each.tokens_per_s:,.1f}",
            f"{each.lowest:,.1f} to {each.highest:,.1f}",
            f"{each.tokens_per_s / http:.2f}×" if http else "–",
            f"{each.computed_tokens:,.0f}",
            f"{len(each.errors)}",
        )
        for way, each in figures.items()
    ]
    title = f"{setup.tokens} tokens each, {setup.lanes} lanes; medians of {setup.blocks * setup.rounds} rounds"
    columns = ("who asks", "tokens/s", "rounds", "against HTTP", "computed", "failed")
    report.table(title, columns, rows)
    for error in {error for each in figures.values() for error in each.errors}:
        report.line(error)
    report.line(f"prompts with the same answer in all rounds: {num_equal} of {setup.clients}")


def _print_forks(report: BenchReport, figures: ForkFigures) -> None:
    rows = [
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("  of which cached", f"{figures.cached_tokens:,}"),
        ("  of which computed", f"{figures.computed_tokens:,}"),
        ("tokens in the tree", f"{figures.tree_tokens:,}"),
        ("  of which the prefix", f"{figures.prefix_tokens:,}"),
        (f"  of which {figures.forks} tails", f"{figures.tail_tokens:,}"),
        ("bytes in the tree", f"{figures.tree_bytes / _MIB:,.1f} MiB"),
        ("  rows of one prefix and all tails", f"{figures.row_bytes / _MIB:,.1f} MiB"),
        ("bytes of the lanes, before", f"{figures.lane_bytes_before / _MIB:,.1f} MiB"),
        ("bytes of the lanes, after", f"{figures.lane_bytes / _MIB:,.1f} MiB"),
    ]
    report.table(f"{figures.forks} forks of one chat, {figures.seconds:.1f} s", ("", ""), rows)
    report.line(f"the prefix was computed {figures.prefixes_computed:.2f} times")
