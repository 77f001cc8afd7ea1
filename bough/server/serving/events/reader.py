"""A reader of the event stream: what it has not been told yet, merged as it changes.

State is told, not a log: if a reader is slow, a later state replaces an earlier one. So what waits for a reader is never
much more than the trees of one moment (`MOST_BEHIND` nodes), and `MOST_REQUESTS` requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bough.server.serving.events.frames import NodePieces, to_json

PIECE_NODES = 1_000
"""A tree is told in pieces of at most so many nodes."""

MOST_BEHIND = 1_000
"""If more than all nodes and so many wait for a reader, because nodes came and went, it is told the whole tree instead."""

MOST_REQUESTS = 1_024
"""So many requests wait for a reader; of more, those that have not changed for longest are not told."""

Frame = tuple[str, str]
"""The name of an event and its JSON."""

OwnRoot = Callable[[str, str], str]
"""The name that the root of a salt has in the same tree as another root."""


@dataclass
class _TreeNews:
    """What a reader has not been told of one tree."""

    is_reset: bool = False
    roots: NodePieces = field(default_factory=dict)

    def add(self, root: str, nodes: dict[int, str | None]) -> None:
        known = self.roots.setdefault(root, {})
        known.update(nodes)
        if self.is_reset:  # the reader will know no node that is gone
            for key in [key for key, piece in nodes.items() if piece is None]:
                del known[key]

    def __len__(self) -> int:
        return sum(map(len, self.roots.values()))


@dataclass
class _News:
    """What a reader has not been told."""

    models: str | None = None
    trees: dict[str, _TreeNews] = field(default_factory=dict)
    requests: dict[tuple[str, str], str] = field(default_factory=dict)  # by salt and id
    figures: dict[str, str] = field(default_factory=dict)

    def write(self) -> Iterator[Frame]:
        """The events, each written when it is asked for: a slow reader has one of them in memory."""
        if self.models is not None:
            yield "models", self.models
        for model, news in self.trees.items():
            for text in _write_tree(model, news):
                yield "tree", text
        for text in self.requests.values():
            yield "request", text
        for text in self.figures.values():
            yield "figures", text


class Reader:
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
        """Whether it is told nothing more, because the server is ending."""
        return self._has_ended.is_set()

    def sees(self, model: str, salt: str | None = None) -> bool:
        """Whether it sees a model, and a root of it if one is given."""
        return self.model in (None, model) and (salt is None or self.salt in (None, salt))

    def tell_models(self, models: str) -> None:
        self._news.models = models
        self._has_news.set()

    def tell_tree(
        self, model: str, pieces: NodePieces, *, is_reset: bool, own_root: OwnRoot = lambda root, salt: salt
    ) -> None:
        """Nodes of a tree have changed; after a reset they are all that there are."""
        if not self.sees(model):
            return
        seen = {root: nodes for root, nodes in pieces.items() if nodes and self._sees_root(root, own_root)}
        if is_reset:
            self._news.trees[model] = _TreeNews(is_reset=True)
        elif not seen:
            return
        news = self._news.trees.setdefault(model, _TreeNews())
        for root, nodes in seen.items():
            news.add(root, nodes)
        self._has_news.set()

    def _sees_root(self, root: str, own_root: OwnRoot) -> bool:
        return self.salt is None or own_root(root, self.salt) == root

    def num_waiting(self, model: str) -> int:
        """How many nodes of a tree it has not been told."""
        return len(self._news.trees.get(model, ()))

    def tell_request(self, model: str, salt: str, request_id: str, request: str) -> None:
        if self.sees(model, salt):
            waiting = self._news.requests
            waiting.pop((salt, request_id), None)
            waiting[salt, request_id] = request
            if len(waiting) > MOST_REQUESTS:
                del waiting[next(iter(waiting))]
            self._has_news.set()

    def tell_figures(self, model: str, figures: str) -> None:
        if self.sees(model):
            self._news.figures[model] = figures
            self._has_news.set()

    def forget_model(self, model: str) -> None:
        """A model is unloaded: what waits of its tree and figures is no longer told."""
        self._news.trees.pop(model, None)
        self._news.figures.pop(model, None)

    def end(self) -> None:
        """Tell it nothing more."""
        self._has_ended.set()
        self._has_news.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for news, or until the time is over."""
        await _wait(self._has_news, timeout_s)

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait so long, or until it is told nothing more."""
        await _wait(self._has_ended, timeout_s)

    def take(self) -> Iterator[Frame]:
        """All that it has not been told yet."""
        taken, self._news = self._news, _News()
        self._has_news.clear()
        return taken.write()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _write_tree(model: str, news: _TreeNews) -> Iterator[str]:
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
