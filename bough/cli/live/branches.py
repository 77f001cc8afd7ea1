"""The part of the trees that has room on a screen: which nodes, and a line for each.

First come the paths of running requests, then the nodes that were used last; a node is never shown without those above it.
Both functions are pure. Choosing costs one look at each node, drawing what was chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rich.text import Text

from bough.cache.admin.drawing import LEAST_TEXT, STEP, bound_indent, columns, shorten
from bough.cli.live.line import Note, columns_of, cut_line, fit_notes, write_line
from bough.cli.live.mirror import Mirror, Node, Root
from bough.cli.terminal.columns import memory
from bough.cli.terminal.screen import neutralise

TIER_STYLES = {"device": "green", "host": "yellow", "disk": "blue"}
"""The colours of the tiers; their names are always written, too."""

_MARK = "▶"  # before a node at which a running request is

Key = tuple[str, str, int]
"""A node of the mirror: model, root and key."""


def choose(mirror: Mirror, room: int) -> set[Key]:
    """The nodes to show in so many lines. Each root that has one takes a line of its own."""
    chosen: set[Key] = set()
    roots: set[tuple[str, str]] = set()
    for model, root, key in _by_importance(mirror, room):
        for each in reversed([key, *_above(mirror.trees[model][root], key)]):
            if (model, root, each) in chosen:
                continue
            if len(chosen) + 1 + len(roots | {(model, root)}) > room:
                break  # what is below it is not shown either
            chosen.add((model, root, each))
            roots.add((model, root))
    return chosen


def _by_importance(mirror: Mirror, room: int) -> Iterator[Key]:
    """The nodes of running requests, then those that were used last: more than there is room for, not all."""
    for request in mirror.running:
        for deepest in mirror.path_of(request)[:1]:
            yield request.model, request.root, deepest
    nodes = (
        (node.last_used, node.end, (model, root, node.key))
        for model, tree in mirror.trees.items()
        for root, found in tree.items()
        for node in found.values()
    )
    for _, _, key in heapq.nlargest(2 * room, nodes):
        yield key


def _above(nodes: Root, key: int) -> Iterator[int]:
    parent = nodes[key].parent
    while parent is not None and parent in nodes:
        yield parent
        parent = nodes[parent].parent


@dataclass(frozen=True)
class Marks:
    """The nodes at which running requests are, and those on their paths."""

    ends: Set[Key]
    paths: Set[Key]

    @classmethod
    def of(cls, mirror: Mirror) -> Marks:
        paths = [[(each.model, each.root, key) for key in mirror.path_of(each)] for each in mirror.running]
        return cls({path[0] for path in paths if path}, {key for path in paths for key in path})


def draw_branches(mirror: Mirror, model: str, chosen: Set[Key], width: int) -> list[Text]:
    """The chosen nodes of one model, and how many more there are."""
    marks, lines, tree = Marks.of(mirror), list[Text](), mirror.trees.get(model, {})
    for root, nodes in sorted(tree.items()):
        shown = {key: node for key, node in nodes.items() if (model, root, key) in chosen}
        if shown:
            lines.append(cut_line(Text(neutralise(f"root {root!r}" if root else "root"), "bold"), width))
            lines += _draw_root(shown, marks, (model, root), width)
    hidden = sum(map(len, tree.values())) - sum(key[0] == model for key in chosen)
    if hidden:
        lines.append(cut_line(Text(f"… and {hidden:,} more node{'s' if hidden > 1 else ''}", "dim"), width))
    return lines


def _draw_root(shown: Mapping[int, Node], marks: Marks, where: tuple[str, str], width: int) -> Iterator[Text]:
    below: dict[int | None, list[Node]] = {}
    for node in sorted(shown.values(), key=lambda each: each.key):  # so that a node keeps its place
        below.setdefault(node.parent, []).append(node)
    most = width // 3 // STEP * STEP
    stack = _push(below.get(None, ()), "", 0)
    while stack:
        indent, depth, node, is_last = stack.pop()
        key = (*where, node.key)
        before = bound_indent(indent, depth, most) + ("└─" if is_last else "├─") + (_MARK if key in marks.ends else " ")
        yield draw_node(node, before, width, is_on_path=key in marks.paths)
        stack += _push(below.get(node.key, ()), indent + ("   " if is_last else "│  "), depth + 1)


def _push(nodes: Sequence[Node], indent: str, depth: int) -> list[tuple[str, int, Node, bool]]:
    return [(indent, depth, node, node is nodes[-1]) for node in reversed(nodes)]


def draw_node(node: Node, before: str, width: int, *, is_on_path: bool = False) -> Text:
    """One line for a node. Its text is shortened first; then the last of its notes are left out."""
    style = "bold" if is_on_path else ""
    head, text = f"{before}[{node.start}, {node.end})", neutralise(" ".join(node.text.split()))
    least = min(LEAST_TEXT, columns(text)) + 3 if text else 0
    notes = fit_notes(width - columns(head) - least, _notes(node))
    room = width - columns(head) - columns_of(notes) - 3
    return write_line(Text(head + (f' "{shorten(text, room)}"' if text and room > 0 else ""), style), notes, width)


def _notes(node: Node) -> list[Note]:
    notes = [(f"{node.num_tokens:,} token{'s' if node.num_tokens > 1 else ''}", "")]
    notes += [(f"{number} on {tier}", TIER_STYLES.get(tier, "")) for tier, number in node.tiers.items()]
    if node.nbytes:
        notes.append((memory(node.nbytes), ""))
    if node.is_in_use:
        notes.append(("in use", "yellow"))
    if node.kept:
        notes.append((f"{len(node.kept)} kept", "magenta"))
    notes.append((f"{node.hits:,} use{'' if node.hits == 1 else 's'}", ""))
    if node.points:
        notes.append((f"{len(node.points)} restore point{'s' if len(node.points) > 1 else ''}", ""))
    return notes
