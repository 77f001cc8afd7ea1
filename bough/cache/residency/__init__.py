"""Residency: which tier holds which page, how many bytes each tier has, and what is evicted when room is short.

What a request does with it: `room.reserve` memory for its lane, `room.hold` and `room.release` the path that it stands on,
`evictor.offer` what has changed, `saver.save` hands a path to the disk. `loader` chooses what is brought up from below the
device, and a `DiskLoad` does it. With a store that machines share, a `Fetch` brings up what others have sent, and `sharer`
offers a path to it. The tries themselves belong to `tree.forest`.
"""

from __future__ import annotations

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import Lanes, LaneSlot, LiveSequence
from bough.cache.residency.loading import Loader
from bough.cache.residency.memory import Memory, SaltForest, SaltTrie, Tiers
from bough.cache.residency.policy import LRU, Policy
from bough.cache.residency.rates import Clock, Rates
from bough.cache.residency.room import Room
from bough.cache.residency.saving import Expiry, Saver
from bough.cache.residency.sharing import Sharer

__all__ = ["Clock", "LaneSlot", "Lanes", "LiveSequence", "Memory", "Rates", "Residency", "SaltForest", "SaltTrie", "Tiers"]


class Residency:
    """The parts of this folder, wired over one memory and one forest."""

    def __init__(
        self,
        memory: Memory,
        forest: SaltForest,
        lanes: Lanes,
        *,
        budget_bytes: int | None,
        policy: Policy | None,
        salt_share: float,
        clock: Clock,
        rates: Rates,
        ttl_s: float | None,
    ) -> None:
        self.memory = memory
        self.forest = forest
        self.lanes = lanes
        self.clock = clock
        self.evictor = Evictor(memory, forest, policy or LRU, salt_share=salt_share, clock=clock)
        self.room = Room(self.evictor, lanes, forest, budget_bytes)
        self.saver = Saver(memory, self.evictor, clock, ttl_s)
        self.loader = Loader(memory, self.evictor, self.room, self.saver, rates, clock)
        self.sharer = Sharer(memory, memory.shared) if memory.shared is not None else None
        self.expiry = Expiry(forest, self.evictor, clock, ttl_s)

    @property
    def total_budget_bytes(self) -> int:
        """What all tiers together may hold; only where the device has a budget."""
        assert self.room.budget_bytes is not None
        disk = self.memory.disk
        return self.room.budget_bytes + self.memory.host_budget_bytes + (disk.budget_bytes if disk is not None else 0)
