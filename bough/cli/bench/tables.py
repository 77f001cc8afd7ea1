"""How the benchmarks print: tables of right-justified columns, and a warning about a busy machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def warn_if_busy(console: Console) -> None:
    from bough.bench.machine import load_warning

    if warning := load_warning():
        console.print(f"[yellow]{warning}[/yellow]")


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def milliseconds_table(title: str, rows: dict[str, float]) -> Table:
    table = make_table(title, ("", "ms"), [(label, f"{value:,.2f}") for label, value in rows.items()])
    table.columns[0].justify = "left"
    return table
