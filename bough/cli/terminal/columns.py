"""Text in columns and short forms of numbers and times. The output is the same on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, with the cells of each column aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def describe(facts: Mapping[str, str], indent: str = "  ") -> list[str]:
    """One line for each fact that has a value, with its name first."""
    return [indent + line for line in align([(name, value) for name, value in facts.items() if value])]


def count(number: int) -> str:
    """A large number in short form: 134.5M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def memory(num_bytes: int) -> str:
    """Bytes of memory, in MiB or GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment was, in its largest unit."""
    if moment is None:
        return ""
    seconds = int(((now or datetime.now(UTC)) - moment).total_seconds())
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            number = seconds // size
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def ahead(moment: datetime, now: datetime | None = None) -> str:
    """How far ahead a moment is, in its largest unit."""
    seconds = round((moment - (now or datetime.now(UTC))).total_seconds())
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            number = seconds // size
            return f"{number} {unit}{'s' if number > 1 else ''} from now"
    return "now"
