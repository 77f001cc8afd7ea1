"""The tree as people and programs see it: plain data, taken at one moment.

Taking a view costs little for each node, because it holds up the engine. Texts and ids are made of the packed tokens when
they are read, in any thread: decoding a whole tree takes seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest, SaltTrie
from bough.cache.tree.node import Node
from bough.cache.tree.state import Tier
from bough.cache.tree.tokens import cut, unpack

Decode = Callable[[Sequence[int]], str]

MOST_BRANCHES = 16
"""The most continuations of the tree that are shown: a node may have as many children as there are tokens."""

_NOT_PLAIN = ("edge", "decode", "children")


@dataclass(frozen=True)
class NodeView:
    """One node: where it stands, what it holds, and when it was last used (seconds ago).

    `nbytes` is memory; `tiers` counts pages and states by where their content lies: device, host, disk.
    """

    start: int
    end: int
    nbytes: int
    num_pages: int
    tiers: dict[str, int]
    points: tuple[int, ...]
    kept: tuple[int, ...]
    is_pinned: bool
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
        for view in reversed(_flatten([self])):
            plain = {name: getattr(view, name) for name in _PLAIN} | ({"token_ids": view.token_ids} if has_ids else {})
            done[id(view)] = plain | {"children": [done[id(child)] for child in view.children]}
        return done[id(self)]


_PLAIN = ("start", "end", "text", *(each.name for each in fields(NodeView)[2:] if each.name not in _NOT_PLAIN))


@dataclass(frozen=True)
class TreeView:
    """All roots, one for each salt; of one that came from disk the salt may not be known yet. `str` draws it."""

    roots: dict[str, list[NodeView]]

    @property
    def nodes(self) -> list[NodeView]:
        """Every node, parents first."""
        return [view for nodes in self.roots.values() for view in _flatten(nodes)]

    def as_dict(self, *, has_ids: bool = True) -> dict[str, Any]:
        return {salt: [node.as_dict(has_ids=has_ids) for node in nodes] for salt, nodes in self.roots.items()}

    def __str__(self) -> str:
        lines = []
        for salt, nodes in self.roots.items():
            lines.append(f"root {salt!r}" if salt else "root")
            lines += _draw(nodes)
        return "\n".join(lines) or "(empty)"


def _flatten(nodes: Sequence[NodeView]) -> list[NodeView]:
    found, stack = [], list(reversed(nodes))
    while stack:
        view = stack.pop()
        found.append(view)
        stack.extend(reversed(view.children))
    return found


def _draw(nodes: Sequence[NodeView], width: int = 48) -> list[str]:
    lines, stack = [], [("", node, node is nodes[-1]) for node in reversed(nodes)]
    while stack:
        indent, view, is_last = stack.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {_label(view, width)}")
        deeper = indent + ("   " if is_last else "│  ")
        stack += [(deeper, child, child is view.children[-1]) for child in reversed(view.children)]
    return lines


def _label(view: NodeView, width: int) -> str:
    text = " ".join(view.text.split())
    if len(text) > width:
        text = f"{text[: width // 2 - 1]} … {text[-(width // 2 - 2) :]}"
    notes = [f"{view.num_tokens} tokens", f"{view.nbytes / 2**20:.1f} MiB", f"{view.hits} uses"]
    if set(view.tiers) - {"device"}:
        notes.insert(2, ", ".join(f"{number} on {tier}" for tier, number in view.tiers.items()))
    notes += [f"restore points {', '.join(map(str, view.points))}"] if view.points else []
    notes += [f"kept {', '.join(map(str, view.kept))}"] if view.kept else []
    notes += ["pinned"] if view.is_pinned else []
    return f'[{view.start}, {view.end}) "{text}"  {" · ".join(notes)}'


def view_tree(forest: SaltForest, now: float, decode: Decode, salt: str | None = None) -> TreeView:
    """A view of the whole tree, or of one salt's part of it; `decode` turns an edge's ids into text."""
    if salt is not None:
        top = _view_trie(forest.find(salt), decode, now)
        return TreeView({salt: top} if top else {})
    return TreeView({_name(salt, trie): _view_trie(trie, decode, now) for salt, trie in forest.tries.items()})


def _name(salt: str, trie: SaltTrie) -> str:
    """The salt; for a root that was found on disk, and whose salt is not known yet, its id there."""
    return salt if salt == trie.salt else f"(on disk {trie.root_id.hex()[:8]})"


def _view_trie(trie: SaltTrie, decode: Decode, now: float) -> list[NodeView]:
    views: dict[Node, NodeView] = {}
    top: list[NodeView] = []
    for node in trie.walk():
        if node.parent is None:
            continue
        parent = views.get(node.parent)
        views[node] = _view(node, decode, now, 0 if parent is None else parent.depth + 1)
        (top if parent is None else parent.children).append(views[node])
    return top


def _view(node: Node, decode: Decode, now: float, depth: int) -> NodeView:
    return NodeView(
        start=node.start,
        end=node.end,
        nbytes=node.nbytes,
        num_pages=sum(len(pages) for pages in node.pages.values()),
        tiers=_tiers(node),
        points=tuple(sorted(node.points)),
        kept=tuple(sorted(at for at, point in node.points.items() if point.kept)),
        is_pinned=bool(node.pins),
        hits=node.hits,
        idle_s=max(0.0, now - node.last_used),
        depth=depth,
        edge=node.edge,
        decode=decode,
    )


def _tiers(node: Node) -> dict[str, int]:
    counts = Counter(item.tier for item in node.items())
    return {tier.name.lower(): counts[tier] for tier in Tier if counts[tier]}


@dataclass(frozen=True)
class Explanation:
    """Why a prompt would be cached as far as it would: where it leaves the tree, and what the tree goes on with there.

    Of many ways in which the tree goes on `tree_goes_on` has a few.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    prompt_goes_on: str
    tree_goes_on: tuple[str, ...]
    reason: str


def explain(cache: PrefixCache, ids: Sequence[int], salt: str, decode: Decode, around: int = 12) -> Explanation:
    """What the tree knows of a prompt, changing nothing."""
    trie = cache.forest.find(salt)
    found = trie.match(ids)
    cached = cache.count_reusable(ids, salt)
    return Explanation(
        prompt_tokens=len(ids),
        matched_tokens=found.length,
        cached_tokens=cached,
        prompt_goes_on=decode(list(ids[found.length : found.length + around])),
        tree_goes_on=tuple(decode(rest) for rest in _continuations(found.node, found.length, around)),
        reason=_reason(len(ids), found.length, cached, is_enabled=cache.is_enabled),
    )


def _continuations(node: Node, at: int, around: int) -> list[list[int]]:
    if at < node.end:
        return [unpack(cut(node.edge, at - node.start, at - node.start + around))]
    return [unpack(cut(child.edge, 0, around)) for child in islice(node.children.values(), MOST_BRANCHES)]


def _reason(total: int, matched: int, cached: int, *, is_enabled: bool) -> str:
    if not is_enabled:
        return "reuse is off for this model or by the settings"
    if matched == 0:
        return "no conversation in the tree begins like this prompt"
    if cached < min(matched, total - 1):
        return f"{matched} tokens are known, and the nearest restore point at or before them is at {cached}"
    if matched == total:
        return "the whole prompt is known; the last token is always evaluated"
    return f"the prompt goes its own way after {matched} tokens that are known"
