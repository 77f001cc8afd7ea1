"""A copy of what a server tells of itself: its models, trees, requests and figures.

`Mirror` applies the events of `/api/events` one after the other. Nothing here reads a clock or a socket.

Always true between calls (`check` asserts it), unless `is_partial`:
- a node's parent is in the same root, or the node begins at 0;
- a node begins where its parent ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_ENDED = 16
"""So many requests that have ended are remembered."""

END_STATES = ("done", "cancelled", "failed")


@dataclass(frozen=True)
class Node:
    """One node as the server told it. `tiers` counts its pages and states by tier."""

    key: int
    parent: int | None
    start: int
    end: int
    text: str
    nbytes: int
    tiers: Mapping[str, int]
    points: tuple[int, ...]
    kept: tuple[int, ...]
    is_in_use: bool
    hits: int
    last_used: float

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class LiveRequest:
    """One request as the server told it. Times are seconds; None if they are not known (yet)."""

    request_id: str
    model: str
    root: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    done_tokens: int
    completion_tokens: int
    node: int | None
    queue_s: float
    first_token_s: float | None
    total_s: float
    without_s: float | None
    error: str

    @property
    def has_ended(self) -> bool:
        return self.state in END_STATES

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were evaluated so far."""
        return max(0, self.done_tokens - self.cached_tokens)


Root = dict[int, Node]
"""The nodes of one root by their keys."""


@dataclass
class Mirror:
    """What the server has told since the connection began. `models` describes those that are loaded, by their names."""

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    trees: dict[str, dict[str, Root]] = field(default_factory=dict)
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    _partial: set[str] = field(default_factory=set)

    @property
    def is_partial(self) -> bool:
        """Whether a tree was told in part, and the rest follows."""
        return bool(self._partial)

    @property
    def running(self) -> list[LiveRequest]:
        """The requests under way, in the order in which they came."""
        return [each for each in self.requests.values() if not each.has_ended]

    @property
    def ended(self) -> list[LiveRequest]:
        """The requests that have ended, the last one first."""
        return [each for each in reversed(self.requests.values()) if each.has_ended]

    def apply(self, event: str, data: Mapping[str, Any]) -> None:
        """Take in one event. One of a name that is not known changes nothing: a newer server may tell more."""
        match event:
            case "models":
                self._apply_models({each["model"]: each for each in data["models"]})
            case "tree":
                self._apply_tree(data)
            case "request":
                self._apply_request(_read_request(data))
            case "figures":
                self.figures[data["model"]] = dict(data)

    def _apply_models(self, models: dict[str, dict[str, Any]]) -> None:
        self.models = models
        for told in (self.trees, self.figures):
            for name in told.keys() - models.keys():
                del told[name]
        self._partial &= models.keys()

    def _apply_tree(self, data: Mapping[str, Any]) -> None:
        model = data["model"]
        if data["reset"]:
            self.trees[model] = {}
        tree = self.trees.setdefault(model, {})
        for told in data["roots"]:
            nodes = tree.setdefault(told["root"], {})
            for key in told["gone"]:
                nodes.pop(key, None)
            nodes.update((each["node"], _read_node(each)) for each in told["nodes"])
        for name in [name for name, nodes in tree.items() if not nodes]:
            del tree[name]
        (self._partial.add if data["more"] else self._partial.discard)(model)

    def _apply_request(self, request: LiveRequest) -> None:
        known = self.requests.get(request.request_id)
        if known is not None and known.has_ended != request.has_ended:
            del self.requests[request.request_id]  # the order of those that have ended is that of their ends
        self.requests[request.request_id] = request
        for each in self.ended[MOST_ENDED:]:
            del self.requests[each.request_id]

    def path_of(self, request: LiveRequest) -> list[int]:
        """The keys of the nodes that hold what a request has in the tree, from the deepest up."""
        nodes, key, path = self.trees.get(request.model, {}).get(request.root, {}), request.node, list[int]()
        while key is not None and key in nodes:
            path.append(key)
            key = nodes[key].parent
        return path

    def check(self) -> None:
        """Assert what always holds."""
        for tree in () if self.is_partial else self.trees.values():
            for nodes in tree.values():
                for node in nodes.values():
                    parent = nodes.get(node.parent) if node.parent is not None else None
                    assert node.start == (parent.end if parent else 0), (node, parent)


def _read_node(told: Mapping[str, Any]) -> Node:
    return Node(
        key=told["node"],
        parent=told["parent"],
        start=told["start"],
        end=told["end"],
        text=told["text"],
        nbytes=told["bytes"],
        tiers=told["tiers"],
        points=tuple(told["points"]),
        kept=tuple(told["kept"]),
        is_in_use=told["in_use"],
        hits=told["hits"],
        last_used=math.inf if told["last_used"] is None else told["last_used"],  # it is being computed for the first time
    )


def _read_request(told: Mapping[str, Any]) -> LiveRequest:
    return LiveRequest(
        request_id=told["id"],
        model=told["model"],
        root=told["root"],
        state=told["state"],
        prompt_tokens=told["prompt_tokens"],
        cached_tokens=told["cached_tokens"],
        done_tokens=told["done_tokens"],
        completion_tokens=told["completion_tokens"],
        node=told["node"],
        queue_s=told["queue_s"],
        first_token_s=told["first_token_s"],
        total_s=told["total_s"],
        without_s=told["without_s"],
        error=told.get("error", ""),
    )
