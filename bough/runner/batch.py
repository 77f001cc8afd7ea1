"""Many requests of one caller at once: as many as the scheduler can choose from, and the next when one has ended."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bough.generate.generation import Generation
from bough.runner.delivery import NO_CALLBACKS, Callbacks, Cancellation, News, Reader, take, telling_number
from bough.scheduling.worker import Worker
from bough.types import Completion

WINDOW = 256
"""The most requests of a batch that are in the queue at a time. Among these the scheduler finds common prefixes."""

Prepare = Callable[[Reader], Generation]
OnDone = Callable[[int, Completion], None]
Result = TypeVar("Result")


def run_batch(
    owner: object,
    worker: Worker,
    requests: Sequence[Prepare],
    callbacks: Callbacks = NO_CALLBACKS,
    on_done: OnDone | None = None,
) -> list[Completion]:
    """The completions of all requests, in their order. If one fails, the others are cancelled, and its error is raised.

    Progress is told of the first request alone.
    """
    arrived: queue.SimpleQueue[tuple[int, News]] = queue.SimpleQueue()
    cancellation = Cancellation()
    running: dict[int, Reader] = {}
    completions: dict[int, Completion] = {}
    following = iter(range(len(requests)))

    def submit_next() -> None:
        number = next(following, None)
        if number is None:
            return
        told = callbacks if number == 0 else replace(callbacks, on_progress=None)
        running[number] = reader = Reader(owner, told, cancellation=cancellation)
        with telling_number(number, len(requests)):
            reader.submit(worker, requests[number](reader), partial(_put, arrived, number))

    try:
        for _ in range(WINDOW):
            submit_next()
        while running:
            number, news = take(worker, arrived, callbacks.wait_s) or (next(iter(running)), None)
            piece = running[number].read(news)
            if isinstance(piece, Completion):
                completions[number] = piece
                if on_done is not None:
                    on_done(number, piece)
                del running[number]
                submit_next()
    finally:
        cancellation.request()
    return [completions[number] for number in range(len(requests))]


def _put(arrived: queue.SimpleQueue[tuple[int, News]], number: int, news: News) -> bool:
    arrived.put((number, news))
    return True


async def gather(starts: Sequence[Callable[[], Awaitable[Result]]]) -> list[Result]:
    """The results of all, in their order, of which `WINDOW` run at a time. If one fails, the others are cancelled."""
    places = asyncio.Semaphore(WINDOW)

    async def run(start: Callable[[], Awaitable[Result]]) -> Result:
        async with places:
            return await start()

    tasks = [asyncio.ensure_future(run(start)) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # none is under way when the caller goes on
