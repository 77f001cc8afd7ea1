"""Text in columns and short forms of numbers and times.

In a pipe, lines are as long as their text; on a terminal no line is longer than the terminal is wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size

_GAP, _SMALL_GAP = "   ", "  "
_NARROWEST = 6  # no column is made narrower than this
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def align(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """One line for each row, with the cells of each column aligned.

    With a width, long cells are shortened to fit, but for those of the first column: a name may have to be typed.
    """
    widths, gap = [max(map(cell_len, column)) for column in zip(*rows, strict=True)], _GAP
    if width is not None and sum(widths) + len(gap) * (len(widths) - 1) > width:
        gap = _SMALL_GAP
        widths = _narrow(widths, width - len(gap) * (len(widths) - 1))
    return [gap.join(map(_fit, row, widths)).rstrip() for row in rows]


def _narrow(widths: list[int], room: int) -> list[int]:
    """The widths of columns that fit into the room: the widest after the first is narrowed as long as possible."""
    first, *others = widths
    while first + sum(others) > room and max(others, default=0) > _NARROWEST:
        others[others.index(max(others))] -= 1
    return [first, *others]


def _fit(cell: str, width: int) -> str:
    shown = cell if cell_len(cell) <= width else set_cell_size(cell, width - 1).rstrip() + "…"
    return set_cell_size(shown, width)


def describe(facts: Mapping[str, str], indent: str = "  ", width: int | None = None) -> list[str]:
    """One line for each fact that has a value, with its name first. With a width, long values go on below."""
    shown = {name: value for name, value in facts.items() if value}
    first = max(map(cell_len, shown), default=0)
    heads = [indent + set_cell_size(name, first) + _GAP for name in shown]
    return [line for head, value in zip(heads, shown.values(), strict=True) for line in wrap(value, head, width)]


def wrap(text: str, before: str = "", width: int | None = None) -> list[str]:
    """The text after `before`, in lines of at most this width that are broken between words where that can be done.

    Line breaks of the text stay.
    """
    room = 0 if width is None else width - cell_len(before)
    parts = [
        [part] if room < _NARROWEST or cell_len(part) <= room else textwrap.wrap(part, room) for part in text.split("\n")
    ]
    first, *rest = [line for part in parts for line in part] or [""]
    return [before + first, *(" " * cell_len(before) + line for line in rest)]


def count(number: int) -> str:
    """A large number in short form: 134.5M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment was, in its largest unit."""
    if moment is None:
        return ""
    seconds = int(((now or datetime.now(UTC)) - moment).total_seconds())
    return f"{_largest_unit(seconds)} ago" if seconds >= 60 else "just now"


def ahead(moment: datetime, now: datetime | None = None) -> str:
    """How far ahead a moment is, in its largest unit."""
    seconds = round((moment - (now or datetime.now(UTC))).total_seconds())
    return f"{_largest_unit(seconds)} from now" if seconds >= 1 else "now"


def _largest_unit(seconds: int) -> str:
    unit, size = next(each for each in _UNITS if seconds >= each[1])
    number = seconds // size
    return f"{number} {unit}{'s' if number > 1 else ''}"
