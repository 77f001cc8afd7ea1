"""The event stream: readers, and a feed for each loaded model while there are any.

Without readers nothing runs. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator

from bough.errors import ShuttingDown, Unavailable
from bough.prompting.ask import tenant_of
from bough.server.serving.events.feed import ModelFeed
from bough.server.serving.events.frames import to_json
from bough.server.serving.events.reader import EventReader, Frame
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded.progress import FollowedRequests, LiveRequests
from bough.system.distribution import VERSION
from bough.system.tasks import wait_until_set

log = logging.getLogger(__name__)

FORMAT = 1
MOST_READERS, MOST_OF_ONE = 64, 16  # clients in all, and with one key or salt, which see one tree alone
LEAST_INTERVAL_S, MOST_INTERVAL_S, INTERVAL_S = 0.1, 10.0, 0.25
_MODELS_S = 0.5  # how often the list of loaded models is read
_BATCH_CHARACTERS = 2**16
_SILENCE_S = 10.0  # after which a reader gets a sign of life


class EventHub:
    def __init__(self, models: LoadedModels, requests: LiveRequests, default_model: str) -> None:
        self._models = models
        self._requests = requests
        self._default_model = default_model
        self._readers: list[EventReader] = []
        self._feeds: dict[str, ModelFeed] = {}
        self._sent_models = ""
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def open(self, salt: str | None, model: str | None = None, interval_s: float = INTERVAL_S) -> EventReader:
        """A new reader for `frames`, until `leave`, of one salt's tree or of all. Raises Unavailable."""
        if self._is_closed:
            raise ShuttingDown("the server is shutting down, and tells no more events")
        if len(self._readers) >= MOST_READERS:
            raise Unavailable(f"{len(self._readers)} clients read events already, and at most {MOST_READERS} may")
        salts = [each.salt for each in self._readers if each.salt is not None]
        if salt is not None and list(map(tenant_of, salts)).count(tenant_of(salt)) >= MOST_OF_ONE:
            raise Unavailable(f"{MOST_OF_ONE} clients with this key or salt read events already, and no more may")
        reader = EventReader(salt, model, interval_s)
        self._readers.append(reader)
        reader.send_models(self._sent_models or self._describe_models())
        for feed in self._feeds.values():
            feed.welcome(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="bough-events")
        return reader

    def leave(self, reader: EventReader) -> None:
        """Remove a reader. A second call does nothing."""
        if reader in self._readers:
            self._readers.remove(reader)

    async def frames(self, reader: EventReader) -> AsyncIterator[list[Frame]]:
        """The events for one reader, in lists to send together; an empty list after a while without news."""
        scope = "all" if reader.salt is None else "own"
        hello = {"version": FORMAT, "bough": VERSION, "interval_s": reader.interval_s, "scope": scope}
        hello["default_model"] = self._default_model
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
        """Keep a feed for each loaded model with a reader, while there are readers."""
        followed = FollowedRequests(None)  # a model may be loaded for a single short answer
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
                    await wait_until_set(followed.wakes, _MODELS_S)
        finally:
            feeds, self._feeds, self._task, self._sent_models = self._feeds, {}, None, ""
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
        if described != self._sent_models:
            self._sent_models = described
            for reader in self._readers:
                reader.send_models(described)

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
