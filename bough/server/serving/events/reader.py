"""A reader of the event stream, with the events that it has not read yet, merged as they change.

Events are states, not a log: for a slow reader a later state replaces an earlier one. So a reader is never much more behind
than the trees of one moment (`MOST_BEHIND` nodes), and `MOST_REQUESTS` requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bough.server.serving.events.frames import NodePieces, to_json
from bough.system.tasks import wait_until_set

PIECE_NODES = 1_000  # the most nodes of one event
MOST_BEHIND = 1_000  # beyond all nodes; if more wait for a reader, it is sent the whole tree instead
MOST_REQUESTS = 1_024  # that wait for a reader; beyond, the one that has not changed for longest is dropped

Frame = tuple[str, str]
"""The name of an event and its JSON."""

OwnRoot = Callable[[str, str], str]
"""The name that the root of a salt has in the same tree as another root."""


@dataclass
class TreeNews:
    """The nodes of a tree that have changed. After a reset these are all of its nodes, and none is gone."""

    is_reset: bool = False
    roots: NodePieces = field(default_factory=dict)

    def add(self, pieces: NodePieces) -> None:
        for root, nodes in pieces.items():
            known = self.roots.setdefault(root, {})
            known.update(nodes)
            if self.is_reset:
                for key in [key for key, piece in nodes.items() if piece is None]:
                    del known[key]
                if not known:
                    del self.roots[root]

    def __len__(self) -> int:
        return sum(map(len, self.roots.values()))


@dataclass
class _News:
    models: str | None = None
    trees: dict[str, TreeNews] = field(default_factory=dict)
    requests: dict[tuple[str, str], str] = field(default_factory=dict)  # by salt and id
    figures: dict[str, str] = field(default_factory=dict)

    def write(self) -> Iterator[Frame]:
        """The events, each written when it is taken: a slow reader has one of them in memory."""
        if self.models is not None:
            yield "models", self.models
        for model, news in self.trees.items():
            for text in _write_tree(model, news):
                yield "tree", text
        for text in self.requests.values():
            yield "request", text
        for text in self.figures.values():
            yield "figures", text


class EventReader:
    """One reader. `salt` is the only root that it sees, None: all; `model` the only model, None: all."""

    def __init__(self, salt: str | None, model: str | None, interval_s: float) -> None:
        self.salt = salt
        self.model = model
        self.interval_s = interval_s
        self._news = _News()
        self._has_news = asyncio.Event()
        self._has_ended = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether it gets nothing more, because the server is ending."""
        return self._has_ended.is_set()

    def sees(self, model: str, salt: str | None = None) -> bool:
        """Whether it sees a model, and a root of it if one is given."""
        return self.model in (None, model) and (salt is None or self.salt in (None, salt))

    def send_models(self, models: str) -> None:
        self._news.models = models
        self._has_news.set()

    def send_tree(
        self, model: str, pieces: NodePieces, *, is_reset: bool, own_root: OwnRoot = lambda root, salt: salt
    ) -> None:
        """Add changed nodes of a tree; after a reset these are all its nodes."""
        if not self.sees(model):
            return
        salt = self.salt
        seen = {root: nodes for root, nodes in pieces.items() if nodes and (salt is None or own_root(root, salt) == root)}
        if is_reset:
            self._news.trees[model] = TreeNews(is_reset=True)
        elif not seen:
            return
        self._news.trees.setdefault(model, TreeNews()).add(seen)
        self._has_news.set()

    def num_waiting(self, model: str) -> int:
        return len(self._news.trees.get(model, ()))

    def send_request(self, model: str, salt: str, request_id: str, request: str) -> None:
        if self.sees(model, salt):
            waiting = self._news.requests
            waiting.pop((salt, request_id), None)
            waiting[salt, request_id] = request
            if len(waiting) > MOST_REQUESTS:
                del waiting[next(iter(waiting))]
            self._has_news.set()

    def send_figures(self, model: str, figures: str) -> None:
        if self.sees(model):
            self._news.figures[model] = figures
            self._has_news.set()

    def forget_model(self, model: str) -> None:
        """Drop the unread tree and figures of a model that was unloaded."""
        self._news.trees.pop(model, None)
        self._news.figures.pop(model, None)

    def end(self) -> None:
        self._has_ended.set()
        self._has_news.set()

    async def wait(self, timeout_s: float) -> None:
        await wait_until_set(self._has_news, timeout_s)

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the time, or until `end`."""
        await wait_until_set(self._has_ended, timeout_s)

    def take(self) -> Iterator[Frame]:
        taken, self._news = self._news, _News()
        self._has_news.clear()
        return taken.write()


def _write_tree(model: str, news: TreeNews) -> Iterator[str]:
    """The news of a tree in pieces of at most PIECE_NODES nodes."""
    nodes = [(root, key, piece) for root, pieces in news.roots.items() for key, piece in pieces.items()]
    for at in range(0, max(1, len(nodes)), PIECE_NODES):
        is_reset = "true" if news.is_reset and at == 0 else "false"
        more = "true" if at + PIECE_NODES < len(nodes) else "false"
        roots = ",".join(_write_roots(nodes[at : at + PIECE_NODES]))
        yield f'{{"model":{to_json(model)},"reset":{is_reset},"roots":[{roots}],"more":{more}}}'


def _write_roots(nodes: list[tuple[str, int, str | None]]) -> Iterator[str]:
    by_root: dict[str, list[tuple[int, str | None]]] = {}
    for root, key, piece in nodes:
        by_root.setdefault(root, []).append((key, piece))
    for root, pieces in by_root.items():
        there = ",".join(piece for _, piece in pieces if piece is not None)
        gone = [key for key, piece in pieces if piece is None]
        yield f'{{"root":{to_json(root)},"nodes":[{there}],"gone":{to_json(gone)}}}'
