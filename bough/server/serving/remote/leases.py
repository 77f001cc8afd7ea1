"""What a replica holds for servers, by ids that they choose. What is not used for `LEASE_S` is closed.

So neither a server that was killed nor a message that was lost keeps anything open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

LEASE_S = 30.0
"""Servers use what they need at least every 20 s."""

Held = TypeVar("Held")


@dataclass
class _Lease(Generic[Held]):
    held: Held
    expiry: asyncio.TimerHandle


class Leases(Generic[Held]):
    """What is held, by its id. Everything here runs on one event loop."""

    def __init__(self, make: Callable[[], Held], close: Callable[[Held], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, _Lease[Held]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def use(self, lease_id: str) -> Held:
        """What is held by this id, for `LEASE_S` from now; it is made if there is nothing."""
        lease = self._leases.get(lease_id)
        expiry = self._loop.call_later(LEASE_S, self._expire, lease_id)
        if lease is None:
            lease = self._leases[lease_id] = _Lease(self._make(), expiry)
        else:
            lease.expiry.cancel()
            lease.expiry = expiry
        return lease.held

    async def close(self, lease_id: str) -> None:
        """Close what is held by this id, if there is anything."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            lease.expiry.cancel()
            await self._close(lease.held)

    def _expire(self, lease_id: str) -> None:
        task = self._loop.create_task(self.close(lease_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
