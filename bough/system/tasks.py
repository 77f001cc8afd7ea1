"""Results for a task: of work that another thread does, and of many pieces of work, some of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from bough.errors import BoughError

Result = TypeVar("Result")
Start = Callable[[Callable[[Result | BoughError], None], Callable[[], bool]], None]
"""Starts work; gets a function for its result, which any thread may call, and one that says whether it is cancelled."""


async def wait_for(start: Start[Result], call: Callable[..., Awaitable[object]] | None = None) -> Result:
    """Start work and return its result, or raise its error. If the caller is cancelled, so is the work.

    `call` runs `start` elsewhere, as `asyncio.to_thread` does.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(outcome: Result | BoughError) -> None:
        if future.done():
            return
        if isinstance(outcome, BoughError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def hear(outcome: Result | BoughError) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nothing waits
            loop.call_soon_threadsafe(settle, outcome)

    try:
        if call is None:
            start(hear, future.cancelled)
        else:
            await call(start, hear, future.cancelled)
        return await future
    finally:
        future.cancel()


async def wait_until_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather(starts: Sequence[Callable[[], Awaitable[Result]]], most: int) -> list[Result]:
    """The results of all, in their order, of which `most` run at a time. If one fails, or the caller ends, all end."""
    results: dict[int, Result] = {}
    following = iter(enumerate(starts))

    async def take_turns() -> None:
        for number, start in following:
            results[number] = await start()

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(most, len(starts)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)  # none is under way when the caller goes on
    return [results[number] for number in range(len(starts))]
