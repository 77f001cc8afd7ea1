"""Leases on what a replica holds for servers, by ids that they choose. What is not used for `LEASE_S` is closed.

So neither a killed server nor a lost message keeps anything open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

LEASE_S = 30.0
"""Servers use what they need at least every 20 s."""

Held = TypeVar("Held")


class Leases(Generic[Held]):
    """The held objects by id. Everything here runs on one event loop."""

    def __init__(self, make: Callable[[], Held], close: Callable[[Held], Coroutine[Any, Any, None]]) -> None:
        self._make = make
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, tuple[Held, asyncio.TimerHandle]] = {}  # with the timer of its expiry
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def use(self, lease_id: str) -> Held:
        """The object with this id, made if there is none. It stays open for `LEASE_S` from now."""
        if lease_id in self._leases:
            held, expiry = self._leases[lease_id]
            expiry.cancel()
        else:
            held = self._make()
        self._leases[lease_id] = held, self._loop.call_later(LEASE_S, self._expire, lease_id)
        return held

    async def close(self, lease_id: str) -> None:
        """Close the object with this id, if there is one. Closing goes on if the caller is cancelled."""
        if lease_id in self._leases:
            held, expiry = self._leases.pop(lease_id)
            expiry.cancel()
            await asyncio.shield(self._start_closing(held))

    def _expire(self, lease_id: str) -> None:
        held, _ = self._leases.pop(lease_id)
        self._start_closing(held)

    def _start_closing(self, held: Held) -> asyncio.Task[None]:
        task = self._loop.create_task(self._close(held))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task
