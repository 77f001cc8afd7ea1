"""The tree as people and programs see it: plain data, taken at one moment.

The engine's thread collects the records of the nodes (`take_records`), which costs what has changed since the last time.
All else is done in the thread that asks: nesting, texts, JSON. Texts and ids are made of the packed tokens when they are
read, because decoding a whole tree takes seconds. An explanation is made in the same two steps.
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
from typing import Any, TypeVar

from bough.cache.admin.drawing import draw
from bough.cache.admin.node_view import PLAIN, Decode, NodeView, flatten, make_view
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import SaltForest, SaltTrie
from bough.cache.steps import Steps, run_at_once
from bough.cache.tree.census import NodeRecord
from bough.cache.tree.node import Node
from bough.cache.tree.tokens import cut, num_tokens, pack, unpack

Result = TypeVar("Result")

MOST_BRANCHES = 16
"""The most continuations of the tree that are shown: a node may have as many children as there are tokens."""

AROUND = 12
"""So many tokens are shown of what follows."""

MOST_DESCRIBED = 2**14
"""The JSON of so many nodes is remembered, so that looking at a tree again and again decodes only what has changed."""

RECENT_S = 1.0
"""The JSON of a root that has not changed is used again for so long; only how long its nodes are idle is out of date."""

MOST_RECENT = 16  # roots

PAUSE_NODES, PAUSE_S = 8, 0.0002
"""After so many nodes, writing JSON pauses so long: else others wait 5 ms for the interpreter at each of their calls."""


@dataclass(frozen=True)
class TreeRecords:
    """The records of all nodes at one moment, by the names of their roots."""

    roots: dict[str, tuple[NodeRecord, ...]]
    taken_s: float


def take_records(forest: SaltForest, clock: Callable[[], float], salt: str | None = None) -> Steps[TreeRecords]:
    """The records of the whole tree, or of one salt's part, at the moment at which this ends.

    First what has changed is recorded, a node a step; the tree may change between two steps. Then all are collected in one.
    """
    yield from forest.census.update()
    if salt is not None:
        records = forest.find(salt).records.take()
        return TreeRecords({salt: records} if records else {}, clock())
    roots = {name_root(each, trie): trie.records.take() for each, trie in forest.tries.items()}
    return TreeRecords(roots, clock())


def name_root(salt: str, trie: SaltTrie) -> str:
    """The salt; for a root that was found on disk, and whose salt is not known yet, its id there."""
    return salt if salt == trie.salt else f"(on disk {trie.root_id.hex()[:8]})"


@dataclass(frozen=True)
class TreeView:
    """All roots, one for each salt; of one that came from disk the salt may not be known yet. `str` draws it.

    Any thread may read it. It stays as it is when the tree changes.
    """

    records: TreeRecords
    decode: Decode
    describe: Callable[[NodeRecord], str]
    recent: RecentJson

    @cached_property
    def roots(self) -> dict[str, list[NodeView]]:
        """The nodes below each root."""
        return {salt: self._nest(records) for salt, records in self.records.roots.items()}

    def _nest(self, records: Sequence[NodeRecord]) -> list[NodeView]:
        below, top = _by_parent(records), list[NodeView]()
        stack = [(record, top, 0) for record in reversed(below[None])]
        while stack:
            record, siblings, depth = stack.pop()
            view = make_view(record, self.decode, self.records.taken_s, depth)
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
        """What `as_dict` gives as JSON, for any depth. It is put together node by node, so that other threads can go on."""
        roots = [f"{json.dumps(salt)}:[{self._root_json(salt, has_ids)}]" for salt in self.records.roots]
        return f"{{{','.join(roots)}}}"

    def _root_json(self, salt: str, has_ids: bool) -> str:
        records, now = self.records.roots[salt], self.records.taken_s
        with self.recent.writes:  # who asks for the same meanwhile waits for it
            text = self.recent.find(salt, has_ids, records, now)
            if text is None:
                text = "".join(self._json_pieces(records, has_ids))
                self.recent.keep(salt, has_ids, RootJson(records, now, text))
            return text

    def _json_pieces(self, records: Sequence[NodeRecord], has_ids: bool) -> Iterator[str]:
        """The nodes of one root, each with its children. Where a node's children end, the stack has None."""
        below, now = _by_parent(records), self.records.taken_s
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
            yield f'{comma}{{{self.describe(record)},{ids}"idle_s":{idle_s},"depth":{depth},"children":['
            stack += [None, *reversed(below[record.key])]
            depth, comma, num_written = depth + 1, "", num_written + 1
            if num_written % PAUSE_NODES == 0:
                time.sleep(PAUSE_S)

    def draw(self, width: int | None = None) -> str:
        """Lines of text, one for each edge; of at most `width` columns, or with a short text each if none is given."""
        return draw(self.roots, width)

    def __str__(self) -> str:
        return self.draw()


@dataclass(frozen=True)
class RootJson:
    """The JSON of one root, written from these records, which were taken at that time."""

    records: Sequence[NodeRecord]
    taken_s: float
    text: str


class RecentJson:
    """The JSON of roots that was written a moment ago, for who looks again and again. Use it with `writes` held."""

    def __init__(self) -> None:
        self.writes = threading.Lock()  # one thread at a time writes
        self._roots: dict[tuple[str, bool], RootJson] = {}

    def find(self, salt: str, has_ids: bool, records: Sequence[NodeRecord], now: float) -> str | None:
        known = self._roots.get((salt, has_ids))
        is_recent = known is not None and known.records is records and now - known.taken_s < RECENT_S
        return known.text if known is not None and is_recent else None

    def keep(self, salt: str, has_ids: bool, written: RootJson) -> None:
        if len(self._roots) >= MOST_RECENT:
            self._roots = {}
        self._roots[salt, has_ids] = written


class Viewer:
    """Puts records into words, in any thread. It remembers the JSON of nodes and roots that stay as they are."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._describe = lru_cache(MOST_DESCRIBED)(partial(_describe, decode))
        self._recent = RecentJson()

    def view(self, records: TreeRecords) -> TreeView:
        """A view of these records; what it shows is worked out when it is read."""
        return TreeView(records, self._decode, self._describe, self._recent)


def _by_parent(records: Sequence[NodeRecord]) -> dict[int | None, list[NodeRecord]]:
    """The nodes below each node, by its key, in the order in which they came; those below the root under None."""
    below: dict[int | None, list[NodeRecord]] = defaultdict(list)
    for record in sorted(records, key=attrgetter("number")):
        below[record.parent].append(record)
    return below


def _describe(decode: Decode, record: NodeRecord) -> str:
    """What JSON says of a node that stays the same until the node changes, without the brackets."""
    view = make_view(record, decode, record.last_used, 0)
    plain = {name: getattr(view, name) for name in PLAIN if name not in ("idle_s", "depth")}
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))[1:-1]


def view_tree(forest: SaltForest, now: float, decode: Decode, salt: str | None = None) -> TreeView:
    """A view of the whole tree, or of one salt's part of it; `decode` turns an edge's ids into text."""
    return Viewer(decode).view(run_at_once(lambda: take_records(forest, lambda: now, salt)))


@dataclass(frozen=True)
class Explanation:
    """Why a prompt would be cached as far as it would: where it leaves the tree, and what the tree goes on with there.

    Of many ways in which the tree goes on `tree_goes_on` has a few. `root` names the tree, `node` is the key of the node in
    which the prompt leaves it; None if that is the root.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    prompt_goes_on: str
    tree_goes_on: tuple[str, ...]
    reason: str
    node: int | None
    root: str


@dataclass(frozen=True)
class Lookup:
    """What the tree knows of a prompt, as plain data: how much, how the tree goes on there, if its end is kept."""

    matched: int
    cached: int
    continuations: tuple[bytes, ...]
    is_kept: bool
    is_enabled: bool
    node: int | None = None
    root: str = ""

    def explain(self, prompt: bytes, decode: Decode) -> Explanation:
        """The same in words, for the packed tokens of the prompt. Any thread may call it."""
        total = num_tokens(prompt)
        return Explanation(
            prompt_tokens=total,
            matched_tokens=self.matched,
            cached_tokens=self.cached,
            prompt_goes_on=decode(unpack(cut(prompt, self.matched, self.matched + AROUND))),
            tree_goes_on=tuple(decode(unpack(rest)) for rest in self.continuations),
            reason=explain_reuse(total, self.matched, self.cached, is_enabled=self.is_enabled),
            node=self.node,
            root=self.root,
        )


def look_up(cache: PrefixCache, prompt: bytes, salt: str) -> Lookup:
    """What the tree knows of a prompt, changing nothing."""
    found = cache.forest.find(salt).match(prompt)
    point = found.node.points.get(num_tokens(prompt))
    return Lookup(
        matched=found.length,
        cached=cache.count_reusable(prompt, salt),
        continuations=_continuations(found.node, found.length),
        is_kept=point is not None and point.kept,
        is_enabled=cache.is_enabled,
        node=None if found.node.is_root else found.node.key,
        root=salt,
    )


def explain(cache: PrefixCache, ids: Sequence[int], salt: str, decode: Decode) -> Explanation:
    """What the tree knows of a prompt, in words."""
    prompt = pack(ids)
    return look_up(cache, prompt, salt).explain(prompt, decode)


def _continuations(node: Node, at: int) -> tuple[bytes, ...]:
    if at < node.end:
        return (cut(node.edge, at - node.start, at - node.start + AROUND),)
    return tuple(cut(child.edge, 0, AROUND) for child in islice(node.children.values(), MOST_BRANCHES))


def explain_reuse(total: int, matched: int, cached: int, *, is_enabled: bool) -> str:
    """Why so many tokens of a prompt of `total` were reused, and not more."""
    if not is_enabled:
        return "reuse is off for this model or by the settings"
    if matched == 0:
        return "no conversation in the tree begins like this prompt"
    if cached < min(matched, total - 1):
        return f"{matched} tokens are known, and the nearest restore point at or before them is at {cached}"
    if matched == total:
        return "the whole prompt is known; the last token is always evaluated"
    return f"the prompt goes its own way after {matched} tokens that are known"
