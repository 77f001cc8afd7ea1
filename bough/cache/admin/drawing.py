"""A drawing of the tree: a line for each edge, with its text and its counts.

Where a width is given, no line has more columns than that. First the text of an edge is shortened, then its list of restore
points; what is left of the counts goes to lines of its own, which are never broken inside a count. In a deep tree the first
levels of the indent give way to the number of levels.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from bough.cache.admin.node_view import NodeView

LEAST_WIDTH, MOST_WIDTH = 40, 1000
"""Narrower terminals than the least get longer lines than they have columns."""

TEXT_COLUMNS = 48
"""Of an edge's text, where no width is given."""

LEAST_TEXT = 16
"""A text is not shortened below this: then the counts go to the next line."""

STEP = 3
"""Columns for each level."""


def draw(roots: Mapping[str, Sequence[NodeView]], width: int | None = None) -> str:
    """All roots by their salts, each with the nodes below it."""
    lines = []
    for salt, nodes in roots.items():
        name = f"root {salt!r}" if salt else "root"
        lines.append(name if width is None else shorten(name, max(width, LEAST_WIDTH)))
        lines += _draw_nodes(nodes, None if width is None else max(width, LEAST_WIDTH))
    return "\n".join(lines) or "(empty)"


def _draw_nodes(nodes: Sequence[NodeView], width: int | None) -> list[str]:
    lines: list[str] = []
    stack = [("", node, node is nodes[-1]) for node in reversed(nodes)]
    while stack:
        indent, view, is_last = stack.pop()
        below = indent + ("   " if is_last else "│  ")
        if width is None:
            lines.append(f"{indent}{'└─' if is_last else '├─'} {_one_line(view)}")
        else:
            most = width // 3 // STEP * STEP
            before = bound_indent(indent, view.depth, most) + ("└─ " if is_last else "├─ ")
            after = bound_indent(below, view.depth, most + STEP) + ("│  " if view.children else "   ")
            lines += _fit(view, before, after, width)
        stack += [(below, child, child is view.children[-1]) for child in reversed(view.children)]
    return lines


def bound_indent(indent: str, depth: int, most: int) -> str:
    """The indent, or the number of levels and the last of them, in as many columns as there may be."""
    if len(indent) <= most:
        return indent
    mark = f"{depth}┆"
    return mark + indent[len(indent) - max(0, most - len(mark)) :]


def _one_line(view: NodeView) -> str:
    return f"[{view.start}, {view.end}){_quote(_text(view), TEXT_COLUMNS)}  {' · '.join(_notes(view))}"


def _fit(view: NodeView, before: str, after: str, width: int) -> list[str]:
    """A node in one line, if its text has enough room there; else its counts follow below it."""
    head, text = f"{before}[{view.start}, {view.end})", _text(view)
    least = min(LEAST_TEXT, columns(text)) + 3 if text else 0
    for is_short in (False, True):
        notes = _notes(view, is_short)
        counts = "  " + " · ".join(notes)
        if len(head) + least + len(counts) <= width:
            return [head + _quote(text, width - len(head) - len(counts) - 3) + counts]
    return [head + _quote(text, width - len(head) - 3), *_wrap(notes, after, width)]


def _wrap(notes: Sequence[str], indent: str, width: int) -> list[str]:
    lines = [indent + notes[0]]
    for note in notes[1:]:
        longer = f"{lines[-1]} · {note}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(indent + note)
    return lines


def _text(view: NodeView) -> str:
    return " ".join(view.text.split())


def _quote(text: str, most: int) -> str:
    """The text in quotes, after a space; nothing for an edge without text, or without room for it."""
    return f' "{shorten(text, most)}"' if text and most > 0 else ""


def _notes(view: NodeView, is_short: bool = False) -> list[str]:
    notes = [f"{view.num_tokens} tokens"]
    if view.nbytes:  # in memory; what is only on disk has none there
        notes.append(f"{view.nbytes / 2**20:.1f} MiB")
    if set(view.tiers) - {"device"}:
        tiers = [f"{number} on {tier}" for tier, number in view.tiers.items()]
        notes += tiers if is_short else [", ".join(tiers)]
    notes.append("1 use" if view.hits == 1 else f"{view.hits} uses")
    for name, offsets in (("restore points", view.points), ("kept", view.kept)):
        if offsets:
            notes.append(f"{len(offsets)} {name}" if is_short else f"{name} {', '.join(map(str, offsets))}")
    return notes + (["pinned"] if view.is_pinned else [])


def columns(text: str) -> int:
    """How many columns a terminal takes for a text, at most."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, most: int) -> str:
    """The text, or its beginning and its end, in at most so many columns."""
    if columns(text) <= most:
        return text
    if most < 4:
        return _take(text, most)
    first = _take(text, (most - 3) - (most - 3) // 2)
    last = _take(text[::-1], (most - 3) // 2)[::-1]
    return f"{first} … {last}"


def _take(text: str, most: int) -> str:
    """As much of the beginning of a text as goes into so many columns."""
    left, end = most, 0
    while end < len(text) and (left := left - _columns_of(text[end])) >= 0:
        end += 1
    return text[:end]
