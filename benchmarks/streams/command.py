"""The command `streams`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.null_engine import NullEngine
from benchmarks.streams.clients import PATHS, ClientSetup
from benchmarks.streams.run import StreamFigures, measure_streams
from bough.cli.bench import BenchReport, Json, Shape, read_shape
from bough.config import Settings
from bough.engines.contract import Engine
from bough.runtime import make_shape


def streams(
    shape: Shape = None,
    clients: Annotated[int, typer.Option(min=1)] = 64,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of an answer.")] = 600,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that all prompts begin with.")] = 512,
    step_ms: Annotated[float, typer.Option(min=0, help="How long a step takes without a shape.")] = 6.5,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    as_json: Json = False,
) -> None:
    """Many clients stream from one server, against the same requests in process; without a shape nothing is computed."""

    def make_engine(settings: Settings) -> Engine:
        return make_shape(read_shape(shape), settings) if shape else NullEngine(step_ms / 1000)

    report = BenchReport("streams", as_json)
    setup = ClientSetup(num_clients=clients, num_tokens=tokens, prompt_bytes=prompt, temperature=temperature, top_p=top_p)
    with report.console.status("streaming"):
        found = measure_streams(make_engine, setup, list(PATHS))
    ways = {"in process": found.in_process, **found.http}
    rows = [(name, *_stream_row(each, found.in_process)) for name, each in ways.items()]
    columns = ("way", "tokens/s", "share", "processor time for a token, µs", "reads", "bytes")
    report.table(f"{clients} streams at once", columns, rows)
    report.finish(asdict(found) | {"share": found.share, "setup": asdict(setup)})


def _stream_row(figures: StreamFigures, in_process: StreamFigures) -> tuple[str, ...]:
    costs = ", ".join(f"{part} {us:.1f}" for part, us in figures.cpu_us.items())
    share = f"{figures.tokens_per_s / in_process.tokens_per_s:.1%}"
    return f"{figures.tokens_per_s:,.0f}", share, costs, f"{figures.reads_per_token:.2f}", f"{figures.bytes_per_token:.0f}"
