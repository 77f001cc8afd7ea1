"""Events for tests, so that none depends on how fast the machine is: what a test holds up, and what it waits for.

A `Gate` holds work until a test opens it. `Notes` wake whoever waits for something to be noted. `pass_time` ends waits by
an event loop's clock. Where there is no event, use `tests.waiting.wait_until`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

from tests.waiting import BOUND_S

Item = TypeVar("Item")


class Gate:
    """Holds threads and coroutines until it is opened, by any thread. It stays open."""

    def __init__(self) -> None:
        self._opened: Future[None] = Future()

    def open(self) -> None:
        """Let everybody pass. A second call does nothing."""
        with suppress(InvalidStateError):
            self._opened.set_result(None)

    def wait(self) -> None:
        """Wait as a thread. Raises TimeoutError if nobody opens it."""
        self._opened.result(BOUND_S)

    async def passed(self) -> None:
        """Wait as a coroutine, whatever the clock of its loop says."""
        await asyncio.shield(asyncio.wrap_future(self._opened))  # who is cancelled closes it for nobody else


class Notes(list[Item], Generic[Item]):
    """What a fake notes by `append`, on any thread. Threads and coroutines wait until enough was noted."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._next = Gate()  # opens with the next note

    def append(self, item: Item) -> None:
        with self._lock:
            super().append(item)
            noted, self._next = self._next, Gate()
        noted.open()

    async def until(self, is_enough: Callable[[], object]) -> None:
        """Wait until this is so; it is looked at when something is noted."""
        while (gate := self._gate_unless(is_enough)) is not None:
            await gate.passed()

    def wait_until(self, is_enough: Callable[[], object]) -> None:
        """As `until`, for a thread. Raises TimeoutError if nothing is noted for long."""
        while (gate := self._gate_unless(is_enough)) is not None:
            gate.wait()

    def _gate_unless(self, is_enough: Callable[[], object]) -> Gate | None:
        gate = self._next  # before the look: what is noted meanwhile opens it
        return None if is_enough() else gate


def pass_time(seconds: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Let the clock of an event loop, by default of the running one, go on by so many seconds at once.

    What is due by then is called next; what uses another clock sees no difference. Any thread may call it.
    """
    loop = loop or asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
    loop.call_soon_threadsafe(lambda: None)  # so that it looks at its clock
