"""The event stream: readers, and a feed for each loaded model while there are any.

Without readers nothing runs and nothing is noted. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator

from bough.errors import ShuttingDown, Unavailable
from bough.server.serving.ask import tenant_of
from bough.server.serving.events.feed import ModelFeed
from bough.server.serving.events.frames import to_json
from bough.server.serving.events.reader import Frame, Reader
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.progress import Followed, LiveRequests
from bough.system.distribution import VERSION

log = logging.getLogger(__name__)

FORMAT = 1
MOST_READERS, MOST_OF_ONE = 64, 16
"""So many clients may read, and so many with one key or salt, which see one tree alone."""

LEAST_INTERVAL_S, MOST_INTERVAL_S, INTERVAL_S = 0.1, 10.0, 0.25

_MODELS_S = 0.5  # how often the list of loaded models is looked at
_BATCH_CHARACTERS = 2**16
_SILENCE_S = 10.0  # after which a reader is told that the server is still there


class EventHub:
    """Lets readers watch the loaded models."""

    def __init__(self, models: LoadedModels, requests: LiveRequests, default_model: str) -> None:
        self._models = models
        self._requests = requests
        self._default_model = default_model
        self._readers: list[Reader] = []
        self._feeds: dict[str, ModelFeed] = {}
        self._told_models = ""
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def open(self, salt: str | None, model: str | None = None, interval_s: float = INTERVAL_S) -> Reader:
        """A new reader, for `frames`; `leave` when it has gone. `salt` is the only tree that it may see, None: all.

        Raises Unavailable if there are too many readers, or the server is ending.
        """
        if self._is_closed:
            raise ShuttingDown("the server is shutting down, and tells no more events")
        if len(self._readers) >= MOST_READERS:
            raise Unavailable(f"{len(self._readers)} clients read events already, and at most {MOST_READERS} may")
        if salt is not None and self._count_readers(tenant_of(salt)) >= MOST_OF_ONE:
            raise Unavailable(f"{MOST_OF_ONE} clients with this key or salt read events already, and no more may")
        reader = Reader(salt, model, interval_s)
        self._readers.append(reader)
        reader.tell_models(self._told_models or self._describe_models())
        for feed in self._feeds.values():
            feed.welcome(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="bough-events")
        return reader

    def _count_readers(self, tenant: str) -> int:
        return sum(each.salt is not None and tenant_of(each.salt) == tenant for each in self._readers)

    def leave(self, reader: Reader) -> None:
        """A reader has gone. A second call does nothing."""
        if reader in self._readers:
            self._readers.remove(reader)

    async def frames(self, reader: Reader) -> AsyncIterator[list[Frame]]:
        """The events for one reader, those that are sent together as one list; it is empty after a while without news."""
        scope = "all" if reader.salt is None else "own"
        hello = {"version": FORMAT, "bough": VERSION, "interval_s": reader.interval_s, "scope": scope}
        yield [("hello", to_json(hello))]
        while not reader.is_ended:
            await reader.wait(_SILENCE_S)
            is_silent = True
            for frames in _batch(reader.take()):
                yield frames
                is_silent = False
            if is_silent:
                yield []
            await reader.wait_for_end(reader.interval_s)

    def close(self) -> None:
        """End all readers, and take no more. A second call does nothing."""
        self._is_closed = True
        for reader in self._readers:
            reader.end()

    async def _run(self) -> None:
        """Have a feed for each loaded model that somebody watches, while there are readers."""
        followed = Followed(None)  # a model may be loaded for a single short answer
        try:
            with self._requests.follow(followed):
                while self._readers:
                    followed.wakes.clear()
                    followed.take_ended()
                    try:
                        await self._update_feeds()
                    except Exception:
                        log.exception("the loaded models could not be listed for those who watch; it is tried again")
                        await asyncio.sleep(_MODELS_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_MODELS_S):
                            await followed.wakes.wait()
        finally:
            feeds, self._feeds, self._task, self._told_models = self._feeds, {}, None, ""
            await asyncio.gather(*(feed.stop() for feed in feeds.values()))

    async def _update_feeds(self) -> None:
        loaded = {each.name: each for each in self._models.list() if each.generates}
        for name, feed in list(self._feeds.items()):
            if name not in loaded or loaded[name] is not feed.loaded or not self._is_watched(name):
                del self._feeds[name]
                await feed.stop()
                for reader in self._readers:
                    reader.forget_model(name)
        for name, model in loaded.items():
            if name not in self._feeds and self._is_watched(name):
                self._feeds[name] = ModelFeed(model, self._requests, lambda: self._readers)
        described = self._describe_models()
        if described != self._told_models:
            self._told_models = described
            for reader in self._readers:
                reader.tell_models(described)

    def _is_watched(self, model: str) -> bool:
        return any(reader.sees(model) for reader in self._readers)

    def _describe_models(self) -> str:
        described = [
            {
                "model": each.name,
                "context_tokens": each.runtime.engine.context_tokens,
                "engine": each.runtime.engine.info.name,
                "device": "CPU" if each.is_on_cpu else "GPU",
                "is_default": each.name == self._default_model,
            }
            for each in self._models.list()
            if each.generates
        ]
        return to_json({"models": sorted(described, key=lambda each: str(each["model"]))})


def _batch(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """Events in lists of about `_BATCH_CHARACTERS`: sending costs more than a short event."""
    batch, size = list[Frame](), 0
    for frame in frames:
        batch.append(frame)
        size += len(frame[1])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
