"""One node of the tree as people and programs see it: plain data, and its text when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bough.cache.residency.census import NodeRecord
from bough.cache.tree.state import Tier
from bough.tokens import unpack

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
