"""Benchmarks of the engine alone, in this process: many lanes at once."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from bough.cli.bench.flags import Engine, Json, Model, Shape, Threads, load_model, read_numbers
from bough.cli.bench.tables import make_table, warn_if_busy


def lanes(
    model: Model = None,
    shape: Shape = None,
    counts: Annotated[
        str, typer.Option("--lanes", help="Numbers of conversations to decode together, separated by commas.")
    ] = "1,2,4,8",
    context: Annotated[int, typer.Option(min=16, help="Tokens of each conversation.")] = 500,
    steps: Annotated[int, typer.Option(min=4)] = 24,
    engine: Engine = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of several conversations that decode together, against one alone."""
    from bough.bench.lanes import measure_lanes

    console = Console(stderr=as_json)
    wanted = read_numbers(counts)
    warn_if_busy(console)
    with (
        console.status("measuring"),
        load_model(model, shape, engine=engine, lanes=max(wanted), threads=threads) as runner,
    ):
        figures = measure_lanes(runner, wanted, context, steps)
    rows = [
        (str(n), f"{ms:,.1f} ms", f"{figures.tokens_per_s[n]:,.1f} tokens/s", f"{figures.ratio[n]:.2f}×")
        for n, ms in figures.step_ms.items()
    ]
    title = f"decoding at {figures.context_tokens:,} tokens of context, medians"
    console.print(make_table(title, ("lanes", "step", "together", "against one"), rows))
    console.print(f"tokens as when run one by one: {figures.agreement:.1%}")
    if as_json:
        print(json.dumps(asdict(figures)))
