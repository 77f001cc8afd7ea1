"""One node of the tree as people and programs see it: plain data, its text when it is asked for, and lines of a drawing.

A drawing has a line for each edge, with its text and its counts. Where a width is given, no line has more columns. First
the text of an edge is shortened, then its list of restore points; the other counts go to lines of their own, which are
never broken inside a count. In a deep tree the first levels of the indent give way to the number of levels.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bough.cache.residency.census import NodeRecord
from bough.cache.tree.state import Tier
from bough.tokens import unpack

LEAST_WIDTH, MOST_WIDTH = 40, 1000
"""Terminals narrower than the least get lines that are longer than they have columns."""

TEXT_COLUMNS = 48
"""For an edge's text, where no width is given."""

LEAST_TEXT = 16
"""A text is not shortened below this: then the counts go to the next line."""

LEVEL_COLUMNS = 3

Decode = Callable[[Sequence[int]], str]

_NOT_PLAIN = ("edge", "decode", "children")


@dataclass(frozen=True)
class NodeView:
    """One node: its place in the tree, its content, and when it was last used (seconds ago).

    `nbytes` is memory; `tiers` counts pages and states by the tier of their content: device, host, disk.
    """

    start: int
    end: int
    nbytes: int
    num_pages: int
    tiers: dict[str, int]
    points: tuple[int, ...]
    kept: tuple[int, ...]
    is_in_use: bool
    hits: int
    idle_s: float
    depth: int
    edge: bytes = field(repr=False)
    decode: Decode = field(repr=False)
    children: list[NodeView] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(unpack(self.edge))

    @property
    def text(self) -> str:
        return self.decode(unpack(self.edge))

    def as_dict(self, *, has_ids: bool = True) -> dict[str, Any]:
        """Plain data for JSON, without recursion limits: the tree as nested dictionaries."""
        done: dict[int, dict[str, Any]] = {}
        for view in reversed(flatten([self])):
            plain = {name: getattr(view, name) for name in PLAIN} | ({"token_ids": view.token_ids} if has_ids else {})
            done[id(view)] = plain | {"children": [done[id(child)] for child in view.children]}
        return done[id(self)]


PLAIN = ("start", "end", "text", *(each.name for each in fields(NodeView)[2:] if each.name not in _NOT_PLAIN))


def make_view(record: NodeRecord, decode: Decode, now: float, depth: int) -> NodeView:
    return NodeView(
        start=record.start,
        end=record.end,
        nbytes=record.nbytes,
        num_pages=record.num_pages,
        tiers={tier.name.lower(): record.tiers[tier] for tier in Tier if record.tiers[tier]},
        points=record.points,
        kept=record.kept,
        is_in_use=record.is_in_use,
        hits=record.hits,
        idle_s=max(0.0, now - record.last_used),
        depth=depth,
        edge=record.edge,
        decode=decode,
    )


def flatten(nodes: Sequence[NodeView]) -> list[NodeView]:
    """These nodes and all below them, parents first."""
    found, stack = [], list(reversed(nodes))
    while stack:
        view = stack.pop()
        found.append(view)
        stack.extend(reversed(view.children))
    return found


def draw(roots: Mapping[str, Sequence[NodeView]], width: int | None = None) -> str:
    """All roots by their salts, each with the nodes below it."""
    lines, width = list[str](), None if width is None else max(width, LEAST_WIDTH)
    for salt, nodes in roots.items():
        name = f"root {salt!r}" if salt else "root"
        lines.append(name if width is None else shorten(name, width))
        lines += _draw_nodes(nodes, width)
    return "\n".join(lines) or "(empty)"


def _draw_nodes(nodes: Sequence[NodeView], width: int | None) -> list[str]:
    lines: list[str] = []
    stack = [("", node, node is nodes[-1]) for node in reversed(nodes)]
    while stack:
        indent, view, is_last = stack.pop()
        below = indent + ("   " if is_last else "│  ")
        if width is None:
            text, notes = _quote(_text(view), TEXT_COLUMNS), " · ".join(_notes(view))
            lines.append(f"{indent}{'└─' if is_last else '├─'} [{view.start}, {view.end}){text}  {notes}")
        else:
            most = width // 3 // LEVEL_COLUMNS * LEVEL_COLUMNS
            before = bound_indent(indent, view.depth, most) + ("└─ " if is_last else "├─ ")
            after = bound_indent(below, view.depth, most + LEVEL_COLUMNS) + ("│  " if view.children else "   ")
            lines += _fit(view, before, after, width)
        stack += [(below, child, child is view.children[-1]) for child in reversed(view.children)]
    return lines


def bound_indent(indent: str, depth: int, most: int) -> str:
    """The indent in at most `most` columns: the first levels are replaced by their number."""
    if len(indent) <= most:
        return indent
    mark = f"{depth}┆"
    return mark + indent[len(indent) - max(0, most - len(mark)) :]


def _fit(view: NodeView, before: str, after: str, width: int) -> list[str]:
    """A node in one line, if its text has enough room there; else its counts are on the next lines."""
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
    if view.nbytes:  # in memory
        notes.append(f"{view.nbytes / 2**20:.1f} MiB")
    if set(view.tiers) - {"device"}:
        tiers = [f"{number} on {tier}" for tier, number in view.tiers.items()]
        notes += tiers if is_short else [", ".join(tiers)]
    notes.append("1 use" if view.hits == 1 else f"{view.hits} uses")
    for name, offsets in (("restore points", view.points), ("kept", view.kept)):
        if offsets:
            notes.append(f"{len(offsets)} {name}" if is_short else f"{name} {', '.join(map(str, offsets))}")
    return notes + (["in use"] if view.is_in_use else [])


def columns(text: str) -> int:
    """How many columns a terminal takes for a text, at most."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, most: int) -> str:
    """The text, or its beginning and its end, in at most `most` columns."""
    if columns(text) <= most:
        return text
    if most < 4:
        return _take(text, most)
    first = _take(text, (most - 3) - (most - 3) // 2)
    last = _take(text[::-1], (most - 3) // 2)[::-1]
    return f"{first} … {last}"


def _take(text: str, most: int) -> str:
    """The longest beginning of a text that fits into `most` columns."""
    left, end = most, 0
    while end < len(text) and (left := left - _columns_of(text[end])) >= 0:
        end += 1
    return text[:end]
