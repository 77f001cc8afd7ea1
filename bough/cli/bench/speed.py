"""Benchmarks of the engine in this process: decoding, prefill, many lanes, and what other weights do to the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bough.bench.plot import require_matplotlib
from bough.bench.speed.decode import DecodeSetup, measure_decode
from bough.bench.speed.figures import Figure, SpeedReport
from bough.bench.speed.prefill import PrefillSetup, measure_prefill
from bough.bench.speed.prompts import PROMPTS
from bough.bench.speed.quality import REFERENCE, Quality, add_up, measure_quality
from bough.bench.speed.report import Surroundings, plot_speed
from bough.bench.speed.variants import find_equal_variants, load_variants
from bough.cli.bench.flags import Engine, Json, Model, Png, Shape, Threads, Weights, load_model, read_numbers, read_weights
from bough.cli.bench.tables import make_table, warn_if_busy
from bough.cli.terminal.progress import make_counter

Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured; the quickest round counts.")]


def decode(
    model: Model = None,
    shape: Shape = None,
    weights: Weights = "float32,auto",
    counts: Annotated[str, typer.Option("--lanes", help="Numbers of lanes in a step, separated by commas.")] = "1,2,4,8",
    depths: Annotated[str, typer.Option("--depth", help="Rows of each lane before, separated by commas.")] = "0,500",
    steps: Annotated[int, typer.Option(min=1, help="Steps in a round.")] = 32,
    rounds: Rounds = 5,
    engine: Engine = None,
    threads: Threads = None,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """The time of a decode step with different weights, in turns in this process."""
    setup = DecodeSetup(read_numbers(counts), read_numbers(depths, least=0), steps, rounds)
    names, console = read_weights(weights), _start(png, as_json)
    around, load = Surroundings(), partial(load_model, model, shape, engine=engine, threads=threads)
    with load_variants(names, lambda each: load(weights=each)) as variants:
        report = SpeedReport("decode", _count(console, "decode", setup.num_cases, measure_decode(variants, setup)))
        report.setup = around.describe(variants) | {"steps": steps, "rounds": rounds}
        _print_speed(console, report, "lanes", around.lines(variants) + find_equal_variants(variants))
    _finish(console, report, png, as_json)


def prefill(
    model: Model = None,
    shape: Shape = None,
    weights: Weights = "float32,auto",
    counts: Annotated[
        str, typer.Option("--tokens", help="Numbers of tokens in a run, separated by commas.")
    ] = "1,16,64,512,2048",
    rows: Annotated[str, typer.Option("--on", help="Rows of the lane before, separated by commas.")] = "0",
    rounds: Rounds = 3,
    engine: Engine = None,
    threads: Threads = None,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """The time of a run of prompt tokens with different weights, in turns in this process."""
    setup = PrefillSetup(read_numbers(counts), read_numbers(rows, least=0), rounds)
    names, console = read_weights(weights), _start(png, as_json)
    around, load = Surroundings(), partial(load_model, model, shape, engine=engine, threads=threads)
    with load_variants(names, lambda each: load(weights=each)) as variants:
        report = SpeedReport("prefill", _count(console, "prefill", setup.num_cases, measure_prefill(variants, setup)))
        report.setup = around.describe(variants) | {"rounds": rounds}
        _print_speed(console, report, "tokens", around.lines(variants) + find_equal_variants(variants))
    _finish(console, report, png, as_json)


def _start(png: Path | None, as_json: bool) -> Console:
    if png is not None:
        require_matplotlib()
    console = Console(stderr=as_json)
    warn_if_busy(console)
    return console


def _count(console: Console, label: str, total: int, cases: Iterable[list[Figure]]) -> list[Figure]:
    """All figures; the terminal shows how many sizes are measured."""
    figures: list[Figure] = []
    with make_counter(console) as progress:
        task = progress.add_task(label, total=total)
        for case in cases:
            figures += case
            progress.advance(task)
    return figures


def _print_speed(console: Console, report: SpeedReport, unit: str, lines: list[str]) -> None:
    first = report.figures[0].weights
    columns = ("rows", unit, "weights", "smallest, ms", "median, ms", "tokens/s", f"against {first}")
    rows = [
        (
            f"{each.rows:,}",
            f"{each.size:,}",
            each.weights,
            f"{each.smallest_ms:,.2f}",
            f"{each.median_ms:,.2f}",
            f"{each.tokens_per_s:,.1f}",
            f"{report.ratio(each):.2f}×",
        )
        for each in report.figures
    ]
    what = "a step" if report.benchmark == "decode" else "a run"
    console.print(make_table(f"{report.benchmark}: the time of {what}; speeds and ratios of the smallest", columns, rows))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _finish(console: Console, report: SpeedReport, png: Path | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_dict()), flush=True)
    if png is not None:  # last: if the plot fails, the figures are already printed
        plot_speed(report, png)
        console.print(f"plot: {png}")


def quality(
    model: Model = None,
    weights: Weights = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="Positions to compare, all prompts together.")] = 1000,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many of the built-in prompts.")] = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What other weights do to the answers: greedy tokens, logits and KL divergence against float32."""
    others = [each for each in read_weights(weights) if each != REFERENCE]
    if not others:
        raise typer.BadParameter(f"{weights!r} names no weights to compare with {REFERENCE}")
    console, around, chosen = Console(stderr=as_json), Surroundings(), PROMPTS[:prompts]
    found: list[Quality] = []
    load = partial(load_model, model, None, threads=threads)
    with (
        load_variants([REFERENCE, *others], lambda each: load(weights=each)) as variants,
        make_counter(console) as progress,
    ):
        task = progress.add_task("quality", total=prompts)
        for part in measure_quality(variants, chosen, -(-tokens // prompts)):
            found += part
            progress.advance(task)
        found += [add_up([each for each in found if each.weights == name]) for name in others]
        about, lines = around.describe(variants), around.lines(variants) + find_equal_variants(variants)
    _print_quality(console, found, lines)
    if as_json:
        print(json.dumps({"benchmark": "quality", **about, "figures": [each.as_dict() for each in found]}))


def _print_quality(console: Console, found: list[Quality], lines: list[str]) -> None:
    columns = ("prompt", "weights", "equal tokens", "same best", "KL mean", "KL max", "logits", "lead")
    table = make_table(f"against {REFERENCE}", columns, map(_quality_row, found))
    table.columns[0].justify = "left"
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _quality_row(each: Quality) -> tuple[str, ...]:
    counts = (f"{each.equal_tokens:,} of {each.positions:,}", f"{each.same_best:,} of {each.positions:,}")
    sizes = (each.kl_mean, each.kl_max, each.largest_difference)
    lead = "–" if each.is_all_equal else f"{each.largest_gap:.1e}"
    return (each.prompt, each.weights, *counts, *(f"{size:.1e}" if size else "0" for size in sizes), lead)


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
        figures = measure_lanes(runner.runtime, wanted, context, steps)
    rows = [
        (str(n), f"{ms:,.1f} ms", f"{figures.tokens_per_s[n]:,.1f} tokens/s", f"{figures.ratio[n]:.2f}×")
        for n, ms in figures.step_ms.items()
    ]
    title = f"decoding at {figures.context_tokens:,} tokens of context, medians"
    console.print(make_table(title, ("lanes", "step", "together", "against one"), rows))
    console.print(f"tokens as when run one by one: {figures.agreement:.1%}")
    if as_json:
        print(json.dumps(asdict(figures)))
