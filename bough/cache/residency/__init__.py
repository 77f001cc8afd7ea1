"""Residency: which tier holds which page, how many bytes each tier has, and what is evicted when room is short.

What a request does with it: `room.reserve` memory for its lane, `room.hold` and `room.release` the path that it stands on,
`evictor.offer` what has changed, `loader` brings back what lies below the device, `saver.save` hands a path to the disk.
With a store that machines share, `fetcher` brings what others have sent, and `sharer` offers a path to it.
The tries themselves belong to `tree.forest`.
"""

from __future__ import annotations

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.fetching import Fetcher
from bough.cache.residency.lanes import Lanes, LiveSequence, Slot
from bough.cache.residency.loading import Loader
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, Tiers
from bough.cache.residency.policy import LRU, Policy
from bough.cache.residency.rates import Clock, Rates
from bough.cache.residency.room import Room
from bough.cache.residency.saving import Expiry, Saver
from bough.cache.residency.sharing import Sharer

__all__ = ["Clock", "Lanes", "LiveSequence", "Memory", "Rates", "Residency", "SaltForest", "SaltTrie", "Slot", "Tiers"]


class Residency:
    """The parts of this folder, wired over one memory and one forest."""

    def __init__(
        self,
        memory: Memory,
        forest: SaltForest,
        lanes: Lanes,
        *,
        page_tokens: int,
        budget_bytes: int | None,
        policy: Policy | None,
        salt_share: float,
        clock: Clock,
        rates: Rates,
        ttl_s: float | None,
    ) -> None:
        self.memory = memory
        self.lanes = lanes
        self.evictor = Evictor(memory, forest, page_tokens, policy or LRU, salt_share=salt_share, clock=clock)
        self.room = Room(self.evictor, lanes, forest, budget_bytes)
        self.loader = Loader(memory, self.evictor, rates)
        self.saver = Saver(memory, self.evictor, page_tokens, clock, ttl_s)
        self.sharer = Sharer(memory, page_tokens)
        self.fetcher = Fetcher(memory, self.evictor, self.room, self.saver, self.loader, page_tokens, clock)
        self.expiry = Expiry(forest, self.evictor, clock, ttl_s)

    @property
    def total_budget_bytes(self) -> int:
        """What all tiers together may hold; only where the device has a budget."""
        assert self.room.budget_bytes is not None
        disk = self.memory.disk
        return self.room.budget_bytes + self.memory.host_budget_bytes + (disk.budget_bytes if disk is not None else 0)
