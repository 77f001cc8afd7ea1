"""A reader of the event stream: what it has not been told yet, merged as it changes.

State is told, not a log: if a reader is slow, a later state replaces an earlier one. So what waits for a reader is never
more than the trees and the requests of one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from bough.server.serving.events.frames import NodePieces, to_json

PIECE_NODES = 1_000
"""A tree is told in pieces of at most so many nodes."""

Frame = tuple[str, str]
"""The name of an event and its JSON."""


@dataclass
class _TreeNews:
    """What a reader has not been told of one tree."""

    is_reset: bool = False
    roots: NodePieces = field(default_factory=dict)


class Reader:
    """One reader. `salt` is the only root that it sees, None: all; `model` the only model, None: all."""

    def __init__(self, salt: str | None, model: str | None, interval_s: float) -> None:
        self.salt = salt
        self.model = model
        self.interval_s = interval_s
        self._models: str | None = None
        self._trees: dict[str, _TreeNews] = {}
        self._requests: dict[str, str] = {}
        self._figures: dict[str, str] = {}
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
        self._models = models
        self._has_news.set()

    def tell_tree(self, model: str, pieces: NodePieces, *, is_reset: bool) -> None:
        """Nodes of a tree have changed; after a reset they are all that there are."""
        if not self.sees(model):
            return
        seen = {root: nodes for root, nodes in pieces.items() if self.salt in (None, root)}
        if is_reset:
            self._trees[model] = _TreeNews(is_reset=True)
        elif not any(seen.values()):
            return
        news = self._trees.setdefault(model, _TreeNews())
        for root, nodes in seen.items():
            news.roots.setdefault(root, {}).update(nodes)
        self._has_news.set()

    def tell_request(self, model: str, salt: str, request_id: str, request: str) -> None:
        if self.sees(model, salt):
            self._requests[request_id] = request
            self._has_news.set()

    def tell_figures(self, model: str, figures: str) -> None:
        self._figures[model] = figures
        self._has_news.set()

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

    def take(self) -> list[Frame]:
        """All that it has not been told yet."""
        self._has_news.clear()
        frames: list[Frame] = [] if self._models is None else [("models", self._models)]
        for model, news in self._trees.items():
            frames += [("tree", text) for text in _write_tree(model, news)]
        frames += [("request", text) for text in self._requests.values()]
        frames += [("figures", text) for text in self._figures.values()]
        self._models, self._trees, self._requests, self._figures = None, {}, {}, {}
        return frames


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
        roots = ",".join(_write_roots(nodes[at : at + PIECE_NODES], is_all=news.is_reset))
        yield f'{{"model":{to_json(model)},"reset":{is_reset},"roots":[{roots}],"more":{more}}}'


def _write_roots(nodes: list[tuple[str, int, str | None]], *, is_all: bool) -> Iterator[str]:
    by_root: dict[str, list[tuple[int, str | None]]] = {}
    for root, key, piece in nodes:
        by_root.setdefault(root, []).append((key, piece))
    for root, pieces in by_root.items():
        there = ",".join(piece for _, piece in pieces if piece is not None)
        gone = [] if is_all else [key for key, piece in pieces if piece is None]
        yield f'{{"root":{to_json(root)},"nodes":[{there}],"gone":{to_json(gone)}}}'
