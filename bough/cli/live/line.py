"""A line on a screen: a beginning, and notes with dots between them, as many as have room.

Its width is counted in columns of the terminal. No line that comes from here is wider than it may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from bough.cache.admin.drawing import columns

Note = tuple[str, str]
"""A piece of a line, and its style."""


def fit_notes(room: int, notes: Sequence[Note]) -> list[Note]:
    """As many of the first notes as have room, and at least one."""
    kept = list(notes)
    while len(kept) > 1 and columns_of(kept) > room:
        kept.pop()
    return kept


def columns_of(notes: Sequence[Note]) -> int:
    """The columns of notes behind a line."""
    return 2 + sum(columns(text) for text, _ in notes) + 3 * (len(notes) - 1)


def write_line(line: Text, notes: Sequence[Note], width: int) -> Text:
    """The line, and after it those of the notes that have room."""
    for number, (text, style) in enumerate(fit_notes(width - columns(line.plain), notes)):
        line.append((" · " if number else "  ") if line.plain else "", "dim")
        line.append(text, style)
    return cut_line(line, width)


def cut_line(line: Text, width: int) -> Text:
    """The line, cut off at the width."""
    line.truncate(width, overflow="ellipsis")
    return line
