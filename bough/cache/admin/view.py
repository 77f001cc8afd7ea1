"""The tree as people and programs see it: plain data, taken at one moment.

The engine's thread collects the records of the nodes (`take_records`), which costs what has changed since the last time.
Nesting, texts and JSON are made in the thread that asks. Texts and ids are made of the packed tokens when they are read,
because decoding a whole tree takes seconds. An explanation is made in the same two steps.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Any

from bough.cache.admin.drawing import MIN_TOKENS, draw
from bough.cache.admin.node_view import PLAIN, Decode, NodeView, flatten, make_view
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltTrie
from bough.cache.residency.census import NodeRecord
from bough.cache.steps import Steps, run_at_once
from bough.cache.tree.node import Node
from bough.tokens import cut, num_tokens, unpack
from bough.types import Boundary, Mark

MOST_BRANCHES = 16
"""The most continuations of the tree that are shown: a node may have as many children as there are tokens."""

AROUND = 12
"""The number of tokens that are shown of each continuation."""

MOST_DESCRIBED = 2**14
"""The number of nodes whose JSON is remembered, so that a repeated look decodes only what has changed."""

RECENT_S = 1.0
"""How long the JSON of an unchanged root is used again; only the idle times of its nodes are out of date then."""

MOST_RECENT = 16  # roots

PAUSE_NODES, PAUSE_S = 8, 0.0002
"""After this number of nodes, writing JSON pauses: else other threads wait 5 ms for the interpreter at each call."""


@dataclass(frozen=True)
class TreeRecords:
    """The records of all nodes at one moment, by the names of their roots."""

    roots: dict[str, tuple[NodeRecord, ...]]
    taken_s: float


def take_records(cache: PrefixCache, clock: Callable[[], float], salt: str | None = None) -> Steps[TreeRecords]:
    """The records of the whole tree, or of one salt's part, at the moment at which this ends.

    First changed nodes are recorded, one in each step; the tree may change between them. Then all are collected in one.
    """
    forest = cache.forest
    yield from cache.memory.census.update()
    if salt is not None:
        records = forest.find(salt).memory.census.take()
        return TreeRecords({salt: records} if records else {}, clock())
    roots = {name_root(each, trie): trie.memory.census.take() for each, trie in forest.tries.items()}
    return TreeRecords(roots, clock())


def name_root(salt: str, trie: SaltTrie) -> str:
    """The salt of a root; its id on disk as long as the salt is not known."""
    return salt if salt == trie.salt else f"(on disk {trie.root_id.hex()[:8]})"


@dataclass(frozen=True)
class TreeView:
    """All roots, one for each salt; of one that came from disk the salt may not be known yet. `str` draws it.

    Any thread may read it. It does not change with the tree.
    """

    records: TreeRecords
    viewer: Viewer

    @cached_property
    def roots(self) -> dict[str, list[NodeView]]:
        """The nodes below each root."""
        return {salt: self._nest(records) for salt, records in self.records.roots.items()}

    def _nest(self, records: Sequence[NodeRecord]) -> list[NodeView]:
        below, top = _by_parent(records), list[NodeView]()
        stack = [(record, top, 0) for record in reversed(below[None])]
        while stack:
            record, siblings, depth = stack.pop()
            view = make_view(record, self.viewer.decode, self.records.taken_s, depth)
            siblings.append(view)
            stack += [(child, view.children, depth + 1) for child in reversed(below[record.key])]
        return top

    @property
    def nodes(self) -> list[NodeView]:
        """Every node, parents first."""
        return [view for nodes in self.roots.values() for view in flatten(nodes)]

    def as_dict(self, *, has_ids: bool = True) -> dict[str, Any]:
        return {salt: [node.as_dict(has_ids=has_ids) for node in nodes] for salt, nodes in self.roots.items()}

    def to_json(self, *, has_ids: bool = True) -> str:
        """The JSON of `as_dict`, for any depth. It is written node by node, so that other threads can go on."""
        now, write = self.records.taken_s, self.viewer.write_root
        roots = [
            f"{json.dumps(salt)}:[{write(salt, records, now, has_ids)}]" for salt, records in self.records.roots.items()
        ]
        return f"{{{','.join(roots)}}}"

    def draw(self, width: int | None = None, depth: int | None = None, min_tokens: int = MIN_TOKENS) -> str:
        """Lines of text, one for each edge, of at most `width` columns; without a width with a short text each.

        Edges below `depth` levels are counted; those of fewer than `min_tokens` are joined with what follows them.
        """
        return draw(self.roots, width, depth, min_tokens)

    def __str__(self) -> str:
        return self.draw()


@dataclass(frozen=True)
class RootJson:
    """The JSON of one root, and the records from which it was written."""

    records: Sequence[NodeRecord]
    taken_s: float
    text: str


class Viewer:
    """Makes views of records, in any thread. It remembers the JSON of nodes and roots that have not changed."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._describe = lru_cache(MOST_DESCRIBED)(partial(_describe, decode))
        self._writes = threading.Lock()  # one thread at a time writes
        self._recent: dict[tuple[str, bool], RootJson] = {}

    def view(self, records: TreeRecords) -> TreeView:
        """A view of these records; its texts are made when they are read."""
        return TreeView(records, self)

    def write_root(self, salt: str, records: Sequence[NodeRecord], now: float, has_ids: bool) -> str:
        """The JSON of one root's nodes; that of a moment ago if they are the same."""
        with self._writes:
            known = self._recent.get((salt, has_ids))
            if known is None or known.records is not records or now - known.taken_s >= RECENT_S:
                if len(self._recent) >= MOST_RECENT:
                    self._recent = {}
                text = "".join(self._json_pieces(records, now, has_ids))
                self._recent[salt, has_ids] = known = RootJson(records, now, text)
            return known.text

    def _json_pieces(self, records: Sequence[NodeRecord], now: float, has_ids: bool) -> Iterator[str]:
        """The nodes of one root, each with its children. Where a node's children end, the stack has None."""
        below = _by_parent(records)
        stack: list[NodeRecord | None] = [*reversed(below[None])]
        depth, comma, num_written = 0, "", 0
        while stack:
            record = stack.pop()
            if record is None:
                yield "]}"
                depth, comma = depth - 1, ","
                continue
            ids = f'"token_ids":{json.dumps(unpack(record.edge))},' if has_ids else ""
            idle_s = max(0.0, now - record.last_used)
            yield f'{comma}{{{self._describe(record)},{ids}"idle_s":{idle_s},"depth":{depth},"children":['
            stack += [None, *reversed(below[record.key])]
            depth, comma, num_written = depth + 1, "", num_written + 1
            if num_written % PAUSE_NODES == 0:
                time.sleep(PAUSE_S)


def _by_parent(records: Sequence[NodeRecord]) -> dict[int | None, list[NodeRecord]]:
    """The nodes below each node, by its key, in the order in which they came; those below the root under None."""
    below: dict[int | None, list[NodeRecord]] = defaultdict(list)
    for record in sorted(records, key=attrgetter("number")):
        below[record.parent].append(record)
    return below


def _describe(decode: Decode, record: NodeRecord) -> str:
    """The JSON fields of a node that stay the same until the node changes, without the brackets."""
    view = make_view(record, decode, record.last_used, 0)
    plain = {name: getattr(view, name) for name in PLAIN if name not in ("idle_s", "depth")}
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))[1:-1]


def view_tree(cache: PrefixCache, now: float, decode: Decode, salt: str | None = None) -> TreeView:
    """A view of the whole tree, or of one salt's part of it; `decode` turns an edge's ids into text."""
    return Viewer(decode).view(run_at_once(lambda: take_records(cache, lambda: now, salt)))


@dataclass(frozen=True)
class Explanation:
    """Why this much of a prompt would be cached: where it leaves the tree, and how the tree continues there.

    `system_tokens` are those of a chat's system text and tools. `tree_goes_on` has the first few continuations. `root`
    names the tree, `node` is the key of the node in which the prompt leaves it; None if that is the root.
    """

    prompt_tokens: int
    system_tokens: int
    matched_tokens: int
    cached_tokens: int
    prompt_goes_on: str
    tree_goes_on: tuple[str, ...]
    reason: str
    node: int | None
    root: str


@dataclass(frozen=True)
class Lookup:
    """The known part of a prompt as plain data: its length, how the tree continues there, whether its end is kept."""

    matched: int
    cached: int
    continuations: tuple[bytes, ...]
    is_kept: bool
    is_enabled: bool
    node: int | None = None
    root: str = ""

    def explain(self, prompt: bytes, decode: Decode, boundaries: Sequence[Boundary] = ()) -> Explanation:
        """The same with texts, for the packed tokens of the prompt and its boundaries. Any thread may call it."""
        total = num_tokens(prompt)
        system = max((each.offset for each in boundaries if each.mark is Mark.SYSTEM_END), default=0)
        return Explanation(
            prompt_tokens=total,
            system_tokens=system,
            matched_tokens=self.matched,
            cached_tokens=self.cached,
            prompt_goes_on=decode(unpack(cut(prompt, self.matched, self.matched + AROUND))),
            tree_goes_on=tuple(decode(unpack(rest)) for rest in self.continuations),
            reason=explain_reuse(total, self.matched, self.cached, system=system, is_enabled=self.is_enabled),
            node=self.node,
            root=self.root,
        )


def look_up(cache: PrefixCache, prompt: bytes, salt: str) -> Lookup:
    """Look a prompt up in the tree. Changes nothing."""
    found = cache.forest.find(salt).match(prompt)
    return Lookup(
        matched=found.length,
        cached=cache.count_reusable(prompt, salt),
        continuations=_continuations(found.node, found.length),
        is_kept=found.is_kept(num_tokens(prompt)),
        is_enabled=cache.is_enabled,
        node=None if found.node.is_root else found.node.key,
        root=salt,
    )


def _continuations(node: Node, at: int) -> tuple[bytes, ...]:
    if at < node.end:
        return (cut(node.edge, at - node.start, at - node.start + AROUND),)
    return tuple(cut(child.edge, 0, AROUND) for child in islice(node.children.values(), MOST_BRANCHES))


def explain_reuse(total: int, matched: int, cached: int, *, is_enabled: bool, system: int = 0) -> str:
    """Why `cached` of a prompt's `total` tokens were reused, and not more. Its first `system` are system text and tools."""
    if not is_enabled:
        return "reuse is off for this model or by the settings"
    if matched == 0:
        return "no conversation in the tree begins like this prompt"
    if cached < min(matched, total - 1):
        return f"{matched} tokens are known, and the nearest restore point at or before them is at {cached}"
    if matched == total:
        return "the whole prompt is known; the last token is always evaluated"
    apart = f"the prompt leaves the tree after {matched} tokens"
    if matched < system:
        return f"{apart}, within its system text and tools ({system} tokens): the rest of these is computed again"
    return apart
