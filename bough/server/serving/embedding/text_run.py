"""The texts of one request on one model: many at a time, each with a result of its own. The first failure ends them all.

Of one request at most `WINDOW` texts are under way, and those of all requests for a model share its places
(`LoadedModel.text_places`): the others wait here, not in the queue of the engine's thread, so that they leave room there
for chats. A request is refused for a full queue only while none of its texts is done; later its other texts wait instead.

Everything here runs on the event loop; results come from the engine's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from bough.errors import BoughError, QueueFull
from bough.runtime.embedding import WINDOW
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.record import RequestRecord
from bough.types import Usage

RETRY_S = 0.05
"""How long a text waits that found the queue full."""


class Counted(Protocol):
    """The result of a text, as far as it is counted here."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


Result = TypeVar("Result", bound=Counted)
Made = TypeVar("Made")
Start = Callable[[Callable[[Result | BoughError], None], Callable[[], bool]], Awaitable[None]]
"""Queues a text: gets whom to tell its result, from any thread, and who knows whether it is still wanted."""


class TextRun:
    """One request. `load_s` is how long it waited for its model."""

    def __init__(self, loaded: LoadedModel, load_s: float) -> None:
        self.loaded = loaded
        self.load_s = load_s
        self.num_tokens = 0
        self._num_done = 0
        self._cached_tokens = 0
        self._began_s = time.perf_counter()

    async def run_all(self, texts: Sequence[Callable[[], Awaitable[Made]]]) -> list[Made]:
        """What is made of each text, in their order, `WINDOW` at a time. If one fails, or the caller ends, all end."""
        made: dict[int, Made] = {}
        following = iter(enumerate(texts))

        async def take_turns() -> None:
            for number, make in following:
                made[number] = await make()

        tasks = [asyncio.create_task(take_turns()) for _ in range(min(WINDOW, len(texts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [made[number] for number in range(len(texts))]

    async def run_one(self, start: Start[Result]) -> Result:
        """The result of one text, when it has had a place. Raises its error."""
        while True:
            try:
                async with self.loaded.text_places:
                    return self._count(await _wait_for(start))
            except QueueFull:
                if not self._num_done:
                    raise
            await asyncio.sleep(RETRY_S)

    def _count(self, result: Result) -> Result:
        self._num_done += 1
        self.num_tokens += result.num_tokens
        self._cached_tokens += result.cached_tokens
        return result

    def record(self, error: str | None = None) -> RequestRecord:
        """The record of what was done so far."""
        computed_tokens = self.num_tokens - self._cached_tokens
        usage = Usage(self.num_tokens, self._cached_tokens, self._cached_tokens, computed_tokens)
        return RequestRecord(
            model=self.loaded.name,
            usage=usage if self._num_done else None,
            total_s=time.perf_counter() - self._began_s,
            num_texts=self._num_done,
            error=error,
        )


async def _wait_for(start: Start[Result]) -> Result:
    """Queue a text and wait for its result. If the caller is cancelled, the text is no longer wanted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def tell(outcome: Result | BoughError) -> None:
        with suppress(RuntimeError):  # the loop has ended, and no client waits
            loop.call_soon_threadsafe(_settle, future, outcome)

    try:
        await start(tell, future.cancelled)
        return await future
    finally:
        future.cancel()


def _settle(future: asyncio.Future[Result], outcome: Result | BoughError) -> None:
    if future.done():
        return
    if isinstance(outcome, BoughError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
