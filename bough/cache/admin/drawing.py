"""A drawing of the tree: a line for each edge, with its text and its counts, what was used last first.

Short edges are joined with what follows them, so that a drawing shows where conversations part and not where their first
tokens happen to agree; short ends beside longer ones are counted in a line. Where a width is given, no line has more
columns: first the text of an edge is shortened, then its counts go to lines of their own, which are never broken inside a
count. In a deep tree the first levels of the indent give way to the number of levels.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bough.cache.admin.node_view import NodeView, flatten
from bough.tokens import unpack

LEAST_WIDTH, MOST_WIDTH = 40, 1000
"""Terminals narrower than the least get lines that are longer than they have columns."""

MIN_TOKENS = 4
"""Edges of fewer tokens are joined with what follows them; ends of fewer are counted."""

TEXT_COLUMNS = 48
"""For an edge's text, where no width is given."""

LEAST_TEXT = 16
"""A text is not shortened below this: then the counts go to the next line."""

LEVEL_COLUMNS = 3
_DAY_S = 86_400
_BELOW_DEVICE = ("host", "disk")


@dataclass(eq=False)
class DrawnEdge:
    """One line of a drawing: a node, or several that are joined, the last of them first."""

    joined: list[NodeView]
    children: list[DrawnEdge]

    @property
    def last(self) -> NodeView:
        return self.joined[0]

    @property
    def start(self) -> int:
        return self.joined[-1].start

    @property
    def num_tokens(self) -> int:
        return self.last.end - self.start

    @property
    def text(self) -> str:
        ids = [each for view in reversed(self.joined) for each in unpack(view.edge)]
        return " ".join(self.last.decode(ids).split())

    def is_short_end(self, min_tokens: int) -> bool:
        return not self.children and self.num_tokens < min_tokens


def draw(
    roots: Mapping[str, Sequence[NodeView]],
    width: int | None = None,
    depth: int | None = None,
    min_tokens: int = MIN_TOKENS,
) -> str:
    """All roots by their salts, each with the edges below it, of at most `depth` levels."""
    lines, width = list[str](), None if width is None else max(width, LEAST_WIDTH)
    for salt, nodes in roots.items():
        name = f"root {salt!r}" if salt else "root"
        lines.append(name if width is None else shorten(name, width))
        lines += _draw_edges(_join(nodes, min_tokens), width, depth, min_tokens)
    return "\n".join(lines) or "(empty)"


def _join(nodes: Sequence[NodeView], min_tokens: int) -> list[DrawnEdge]:
    """The edges to draw for these nodes and all below them, the one that was used last first."""
    done: dict[int, list[DrawnEdge]] = {}
    for view in reversed(flatten(nodes)):
        below = _by_use(edge for child in view.children for edge in done.pop(id(child)))
        if below and view.num_tokens < min_tokens:
            for edge in below:
                edge.joined.append(view)
            done[id(view)] = below
        elif len(below) == 1 and below[0].is_short_end(min_tokens):
            done[id(view)] = [DrawnEdge([*below[0].joined, view], [])]
        else:
            done[id(view)] = [DrawnEdge([view], below)]
    return _by_use(edge for view in nodes for edge in done[id(view)])


def _by_use(edges: Iterable[DrawnEdge]) -> list[DrawnEdge]:
    return sorted(edges, key=lambda edge: edge.last.idle_s)


def _draw_edges(edges: Sequence[DrawnEdge], width: int | None, depth: int | None, min_tokens: int) -> list[str]:
    lines: list[str] = []
    stack: list[tuple[str, int, DrawnEdge | str, bool]] = [*reversed(_rows("", 0, edges, depth, min_tokens))]
    while stack:
        indent, level, row, is_last = stack.pop()
        if isinstance(row, str):
            lines.append(bound_indent(indent, level, _most_indent(width)) + ("└─ " if is_last else "├─ ") + row)
            continue
        below = _rows(indent + ("   " if is_last else "│  "), level + 1, row.children, depth, min_tokens)
        lines += _draw_edge(row, indent, level, is_last, bool(below), width)
        stack += reversed(below)
    return lines


def _rows(
    indent: str, level: int, edges: Sequence[DrawnEdge], depth: int | None, min_tokens: int
) -> list[tuple[str, int, DrawnEdge | str, bool]]:
    """The rows of one level: its edges, or a line that counts them below the last level; short ends are counted in one."""
    rows: list[DrawnEdge | str] = []
    if depth is not None and level >= depth:
        rows += [f"… {_counted(len(edges), 'branch', 'branches')}"] if edges else []
    else:
        short = [edge for edge in edges if len(edges) > 1 and edge.is_short_end(min_tokens)]
        rows += [edge for edge in edges if edge not in short]
        rows += [f"… {_counted(len(short), 'end', 'ends')} of fewer than {min_tokens:,} tokens"] if short else []
    return [(indent, level, row, row is rows[-1]) for row in rows]


def _most_indent(width: int | None) -> int | None:
    return None if width is None else width // 3 // LEVEL_COLUMNS * LEVEL_COLUMNS


def _draw_edge(edge: DrawnEdge, indent: str, level: int, is_last: bool, has_children: bool, width: int | None) -> list[str]:
    before = bound_indent(indent, level, _most_indent(width)) + ("└─ " if is_last else "├─ ")
    if width is None:
        return [f"{before}[{edge.start}, {edge.last.end}){_quote(edge.text, TEXT_COLUMNS)}  {' · '.join(_notes(edge))}"]
    below = indent + ("   " if is_last else "│  ")
    most = (_most_indent(width) or 0) + LEVEL_COLUMNS
    after = bound_indent(below, level, most) + ("│  " if has_children else "   ")
    return _fit(edge, before, after, width)


def bound_indent(indent: str, level: int, most: int | None) -> str:
    """The indent in at most `most` columns: the first levels are replaced by their number."""
    if most is None or len(indent) <= most:
        return indent
    mark = f"{level}┆"
    return mark + indent[len(indent) - max(0, most - len(mark)) :]


def _fit(edge: DrawnEdge, before: str, after: str, width: int) -> list[str]:
    """An edge in one line, if its text has enough room there; else its counts are on the next lines."""
    head, text, notes = f"{before}[{edge.start}, {edge.last.end})", edge.text, _notes(edge)
    least = min(LEAST_TEXT, columns(text)) + 3 if text else 0
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


def _quote(text: str, most: int) -> str:
    """The text in quotes, after a space; nothing for an edge without text, or without room for it."""
    return f' "{shorten(text, most)}"' if text and most > 0 else ""


def _notes(edge: DrawnEdge) -> list[str]:
    """What is known of an edge, in words: its use is that of the last of the joined nodes."""
    notes = [_counted(edge.num_tokens, "token", "tokens")]
    if num_bytes := sum(view.nbytes for view in edge.joined):  # in memory
        notes.append(_size(num_bytes))
    place = _place({tier for view in edge.joined for tier in view.tiers})
    notes += [*([place] if place else []), *_use(edge.last)]
    if num_points := sum(len(view.points) for view in edge.joined):
        notes.append(_counted(num_points, "restore point", "restore points"))
    if kept := [offset for view in edge.joined for offset in view.kept]:
        notes.append(f"kept to {max(kept):,}")
    return notes + (["in use"] if any(view.is_in_use for view in edge.joined) else [])


def _place(tiers: set[str]) -> str:
    """Where the content is, if not all of it is on the device."""
    below = " and ".join(tier for tier in _BELOW_DEVICE if tier in tiers)
    return f"{'part ' if 'device' in tiers else ''}on {below}" if below else ""


def _use(view: NodeView) -> list[str]:
    """How often it was used, and when, if that was not within a day."""
    days = int(view.idle_s // _DAY_S)
    times = "used once" if view.hits == 1 else f"used {view.hits:,} times"
    return [times, f"last {_counted(days, 'day', 'days')} ago"] if days else [times]


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(num_bytes: int) -> str:
    """Bytes in the decimal units in which downloads are counted."""
    unit, size = next((each for each in (("GB", 10**9), ("MB", 10**6)) if num_bytes >= each[1]), ("kB", 10**3))
    return f"{num_bytes / size:.1f} {unit}"


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
