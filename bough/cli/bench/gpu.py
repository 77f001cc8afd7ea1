"""`bough bench gpu`: the whole way from a request to its tokens on a device, with a model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bough.bench.gpu.setup import PARTS, Figure, GpuSetup
from bough.cli.bench.flags import Json, read_numbers, read_shape
from bough.cli.bench.tables import make_table, warn_if_busy

_NAMED = "llama-8b, tiny, or a file with a transformers configuration"


def gpu(
    shape: Annotated[str, typer.Option(help=f"Random weights: {_NAMED}.")] = "llama-8b",
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, separated by commas.")] = ",".join(PARTS),
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a prompt.")] = 8192,
    counts: Annotated[str, typer.Option("--lanes", help="Numbers of requests on one prefix.")] = "1,4,16,64",
    distinct: Annotated[int, typer.Option(min=0, help="Requests that share nothing; 0: not measured.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Tokens of each request in a window; there are three.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often each first token is measured; the median counts.")] = 5,
    given: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the engine, such as dtype=bfloat16.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the kernels of a decode step.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file for the JSON, written after every figure.")] = None,
    as_json: Json = False,
) -> None:
    """Decode, first tokens, page-ins, memory, start and HTTP streams on a GPU, through the real scheduler."""
    from bough.bench.gpu.run import GpuReport, run_parts

    setup = GpuSetup(
        shape=_read_shape(shape),
        settings=_read_settings(given or []),
        tokens=tokens,
        lanes=read_numbers(counts),
        distinct=distinct,
        steps=steps,
        warm_tokens=min(32, steps),
        rounds=rounds,
        is_profiled=profile,
    )
    console, wanted = Console(stderr=as_json), _read_parts(parts)
    warn_if_busy(console)
    report, num_said = GpuReport(setup), 0
    with console.status("measuring"):
        for report in run_parts(setup, wanted):
            _write(out, report.as_dict())
            if report.newest is not None and report.num_figures > num_said:  # a run that is killed has said what it found
                num_said = report.num_figures
                console.print(_line(report.newest), highlight=False, markup=False, soft_wrap=True)
    _print(console, report.figures)
    for part, error in report.errors.items():
        console.print(f"{part} failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(report.as_dict()), flush=True)
    if report.errors:
        raise typer.Exit(1)


def _line(figure: Figure) -> str:
    return f"{figure.name}: {figure.value:,} {figure.unit} {_note(figure)}".rstrip()


def _write(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _print(console: Console, figures: dict[str, list[Figure]]) -> None:
    table = make_table("on this device", ("part", "what", "figure", "", "of it"), _rows(figures))
    for number in (0, 1, 3, 4):
        table.columns[number].justify = "left"
    console.print(table)
    for each in (each for found in figures.values() for each in found):
        for profile in _profiles(each):
            profile.columns[0].justify = "left"
            console.print(profile)


def _profiles(figure: Figure) -> Iterator[Table]:
    """What a profile has found: the kernels of a step, or where each thread of a server was."""
    if kernels := figure.detail.get("kernels"):
        rows = [(each["name"], f"{each['runs']:,}", f"{each['microseconds']:,.1f}") for each in kernels]
        yield make_table(figure.name, ("kernel", "runs", "µs"), rows)
    for thread, places in figure.detail.get("threads", {}).items():
        shares = [(each["place"], f"{each['share']:.1%}") for each in places]
        yield make_table(f"the server's thread {thread}", ("where", "share"), shares)


def _rows(figures: dict[str, list[Figure]]) -> Iterator[Sequence[str]]:
    for part, found in figures.items():
        for each in found:
            yield part, each.name, f"{each.value:,}", each.unit, _note(each)


def _note(figure: Figure) -> str:
    """What of the detail belongs beside the figure."""
    found = figure.detail
    if "tokens_per_s" in found and "host_ms" in found:
        return f"{found['tokens_per_s']:,.0f} tokens/s; the host {found['host_ms']:.2f} ms a turn"
    if "used_bytes" in found:
        return (
            f"{found['used_bytes']:,} bytes used, {found['rows_bytes']:,} of rows, {found['page_bytes']:,} of whole pages"
        )
    if "host_bytes" in found and isinstance(found["host_bytes"], list):
        return f"{found['host_bytes'][0]:,} bytes from the host"
    return ""


def _read_parts(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in PARTS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PARTS)}")
    return names


def _read_shape(name: str) -> dict[str, Any]:
    """A named shape, or the configuration in a file."""
    file = Path(name)
    if not file.is_file():
        return read_shape(name)
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}") from error
    return config


def _read_settings(given: Sequence[str]) -> dict[str, str]:
    """Settings given as NAME=VALUE; the runner checks names and values."""
    pairs = [each.partition("=") for each in given]
    for name, sign, _ in pairs:
        if not (name and sign):
            raise typer.BadParameter(f"{name!r} is not a setting and its value, such as graphs=off")
    return {name: value for name, _, value in pairs}
