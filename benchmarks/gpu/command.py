"""The command `gpu`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.run import GpuReport, run_parts
from benchmarks.gpu.setup import PARTS, GpuFigure, GpuSetup
from bough.cli.bench import BenchReport, Json, read_numbers, read_shape

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
    wanted, report = _read_parts(parts), BenchReport("gpu", as_json)
    found, num_printed = GpuReport(setup), 0
    with report.console.status("measuring"):
        for found in run_parts(setup, wanted):
            if out is not None:
                out.write_text(json.dumps(report.as_dict(found.as_dict()), indent=1) + "\n", encoding="utf-8")
            if found.newest is not None and found.num_figures > num_printed:  # a run that is killed has said what it found
                num_printed = found.num_figures
                report.line(_line(found.newest))
    _print(report, found.figures)
    for part, error in found.errors.items():
        report.line(f"{part} failed: {error}")
    report.finish(found.as_dict())
    if found.errors:
        raise typer.Exit(1)


def _line(figure: GpuFigure) -> str:
    return f"{figure.name}: {figure.value:,} {figure.unit} {_note(figure)}".rstrip()


def _print(report: BenchReport, figures: dict[str, list[GpuFigure]]) -> None:
    report.table("on this device", ("part", "what", "figure", "", "of it"), _rows(figures), left=(0, 1, 3, 4))
    for each in (each for found in figures.values() for each in found):
        if kernels := each.detail.get("kernels"):
            rows = [(kernel["name"], f"{kernel['runs']:,}", f"{kernel['microseconds']:,.1f}") for kernel in kernels]
            report.table(each.name, ("kernel", "runs", "µs"), rows)


def _rows(figures: dict[str, list[GpuFigure]]) -> Iterator[Sequence[str]]:
    for part, found in figures.items():
        for each in found:
            yield part, each.name, f"{each.value:,}", each.unit, _note(each)


def _note(figure: GpuFigure) -> str:
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
            raise typer.BadParameter(f"{name!r} is not a setting and its value, such as lanes=4")
    return {name: value for name, _, value in pairs}
