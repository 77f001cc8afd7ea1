"""The command `gaps`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.gaps.figures import GapCase
from benchmarks.gaps.run import PARTS, measure_gaps
from bough.cli.bench import BenchReport, Json, Model
from bough.config import load_settings


def gaps(
    model: Model = None,
    only: Annotated[
        str | None, typer.Option(help="Only these parts, separated by commas: loading, transfer, tree, writes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The longest pause of eight answers while the server loads, exports, imports, shows its tree, or cannot write."""
    parts = only.split(",") if only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    report, found = BenchReport("gaps", as_json), list[GapCase]()
    with report.counting("starting servers", None) as count:

        def note(case: GapCase) -> None:
            found.append(case)
            count(f"{case.part}: {case.name}")

        figures = measure_gaps(model or load_settings().model, parts, note)
    columns = ("while", "longest", "alone", "ratio", "99 %", "alone")
    report.table("gaps between two tokens of eight streams, ms", columns, map(_gap_row, found))
    for case in found:
        report.line(f"{case.name}: {case.note}")
    report.finish(figures)


def _gap_row(case: GapCase) -> tuple[str, ...]:
    quiet, disturbed = case.quiet, case.disturbed
    longest = (f"{disturbed.longest_ms:,.0f}", f"{quiet.longest_ms:,.0f}", f"{case.ratio:.2f}")
    return (case.name, *longest, f"{disturbed.p99_ms:,.0f}", f"{quiet.p99_ms:,.0f}")
