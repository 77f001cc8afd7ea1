"""The benchmark of the library: many requests at once, and many forks of one chat."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bough.cli.bench.flags import Json, Model
from bough.cli.bench.tables import make_table, warn_if_busy
from bough.cli.terminal.progress import make_counter

if TYPE_CHECKING:
    from bough.bench.library.forks import ForkFigures
    from bough.bench.library.together import Round, TogetherSetup, Way, WayFigures

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
    from bough.bench.library.forks import ForkSetup, measure_forks
    from bough.bench.library.together import WAYS, TogetherSetup, WayFigures, count_equal_answers
    from bough.runner import load

    console = Console(stderr=as_json)
    warn_if_busy(console)
    setup = TogetherSetup(clients, lanes, tokens, rounds=rounds, blocks=blocks)
    measured = _measure(console, model, setup)
    figures = {way: WayFigures.of([each for each in measured if each.way == way]) for way in WAYS}
    num_equal = count_equal_answers(measured)
    with console.status("forks"), load(model, disk=0, lanes=lanes) as runner:
        forked = measure_forks(runner, ForkSetup(forks, prefix))
        setup_of_engine = runner.describe()
    _print_together(console, setup, figures, num_equal)
    _print_forks(console, forked)
    if as_json:
        report = {
            "setup": asdict(setup) | setup_of_engine,
            "together": {way: asdict(each) for way, each in figures.items()},
            "equal_answers": num_equal,
            "forks": asdict(forked) | {"prefixes_computed": round(forked.prefixes_computed, 3)},
        }
        print(json.dumps(report))


def _measure(console: Console, model: str | None, setup: TogetherSetup) -> list[Round]:
    from bough.bench.library.together import measure_together

    measured: list[Round] = []
    with make_counter(console) as progress:
        task = progress.add_task("together", total=setup.num_rounds)
        for each in measure_together(model, setup):
            measured.append(each)
            progress.update(task, description=each.way, advance=1)
    return measured


def _print_together(console: Console, setup: TogetherSetup, figures: dict[Way, WayFigures], num_equal: int) -> None:
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
    table = make_table(title, columns, rows)
    table.columns[0].justify = "left"
    console.print(table)
    for error in {error for each in figures.values() for error in each.errors}:
        console.print(f"[red]{error}[/red]")
    console.print(f"prompts with the same answer in all rounds: {num_equal} of {setup.clients}")


def _print_forks(console: Console, figures: ForkFigures) -> None:
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
    table = make_table(f"{figures.forks} forks of one chat, {figures.seconds:.1f} s", ("", ""), rows)
    table.columns[0].justify = "left"
    console.print(table)
    console.print(f"the prefix was computed {figures.prefixes_computed:.2f} times")
