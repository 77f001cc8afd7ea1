"""Messages of other threads on their way to an event loop, many of them handed over by one wake-up.

A decode step ends with a piece of text for every lane, and waking the loop is a system call of the engine's thread: so the
loop is woken once for all pieces that come before it runs. A mailbox is read as a whole, so its reader is woken once for
all messages that have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Mailbox(Generic[Message]):
    """The messages for one reader, in the order in which they came. Everything here runs on the event loop."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._has_some = asyncio.Event()

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._has_some.set()

    async def take(self) -> list[Message]:
        """Wait for the first message, and return all that have come."""
        await self._has_some.wait()
        self._has_some.clear()
        messages, self._messages = self._messages, []
        return messages


class Inbox(Generic[Message]):
    """Puts messages into mailboxes of one event loop, in the order in which they came. Any thread may put."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[tuple[Mailbox[Message], Message]] = []

    def put(self, mailbox: Mailbox[Message], message: Message) -> bool:
        """Put a message into a mailbox soon. Returns False after the end of the loop: the message has no reader."""
        with self._lock:
            self._waiting.append((mailbox, message))
            is_first = len(self._waiting) == 1
        if is_first and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(self._deliver)
        return not self._loop.is_closed()

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for mailbox, message in waiting:
            mailbox.put(message)
