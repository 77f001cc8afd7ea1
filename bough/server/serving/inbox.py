"""The inbox of an event loop: messages of other threads, many of them handed over by one wake-up.

A decode step ends with a piece of text for every lane, and waking the loop is a system call of the engine's thread: so it
is woken once for all pieces that come before it runs.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Puts messages into queues of one event loop, in the order in which they came. Any thread may put."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.Queue[Message], Message]] = []

    def put(self, queue: asyncio.Queue[Message], message: Message) -> None:
        """Put a message into a queue soon. After the end of the loop it is dropped: nobody reads it."""
        with self._lock:
            self._waiting.append((queue, message))
            is_first = len(self._waiting) == 1
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for queue, message in waiting:
            queue.put_nowait(message)
