"""The prefix cache: one tree, its memory and its lanes, as requests see them.

`begin` matches a prompt, plans the deepest offset that every group can be restored to, makes room and lets a lane adopt it.
What lies on disk is read by other threads first: until then the session that it returns is loading. It publishes what the
lane computes and closes. One thread at a time calls, and never waits for the disk in `begin` or in a session.

Always true between calls (`check` asserts it):
- the tries hold, each for itself, what `Trie.check` says, and their bytes are what `Memory` counts, tier by tier;
- lanes and tree together stay within the device's budget, and the tree within the host's and the disk's;
- what lies on disk alone has a saved file there, unless that was found damaged;
- what is reserved for loading is what the loads under way still wait for;
- only busy lanes pin anything, each exactly one node, at or before the lane's offset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.cache.adoption import Adopter
from bough.cache.finish import Finisher
from bough.cache.record import POINT_SPACING, CaptureCosts, Recorder
from bough.cache.residency import Clock, Lanes, Memory, Rates, Residency, SaltForest, SaltTrie, Tiers
from bough.cache.residency.policy import Policy
from bough.cache.residency.saving import forget_disk
from bough.cache.restore import restore
from bough.cache.session import Session, SessionContext
from bough.cache.tree.forest import Forest
from bough.cache.tree.state import PAGE_TOKENS, Lane, PageStore
from bough.cache.tree.tokens import num_tokens, pack
from bough.errors import RequestError
from bough.types import Boundary


@dataclass(frozen=True)
class ReuseVersion:
    """The state of one salt's trie and of the lanes. While two are equal, the same tokens of any prompt are reusable."""

    trie: SaltTrie | None
    trie_version: int
    lanes_version: int


class PrefixCache:
    """Begins sessions over one set of lanes, one budget for each tier, and one trie for each salt."""

    def __init__(
        self,
        store: PageStore,
        lanes: Sequence[Lane],
        *,
        budget_bytes: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_enabled: bool = True,
        can_chunk: bool = True,
        reuse_limit: int | None = None,
        tiers: Tiers | None = None,
        rates: Rates | None = None,
        salt_share: float = 1.0,
        keeps_on_device: bool = True,
        ttl_s: float | None = None,
        point_spacing: int = POINT_SPACING,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = Clock(clock, wall)
        self.memory = Memory(store, tiers)
        self.forest: SaltForest = Forest(self.memory, page_tokens)
        self.lanes = Lanes(lanes)
        self.residency = residency = Residency(
            self.memory,
            self.forest,
            self.lanes,
            page_tokens=page_tokens,
            budget_bytes=budget_bytes,
            policy=policy,
            salt_share=salt_share,
            clock=self.clock,
            rates=rates or Rates(clock),
            ttl_s=ttl_s,
        )
        self.costs = costs = CaptureCosts(self.memory.groups, is_bounded=budget_bytes is not None)
        self.is_enabled = is_enabled and can_chunk
        self._adopter = Adopter(residency, self.forest, costs)
        self.finisher = Finisher(residency, costs, page_tokens, self.clock, policy=policy, keeps_on_device=keeps_on_device)
        self._context = SessionContext(
            groups=tuple(self.memory.groups),
            page_tokens=page_tokens,
            point_spacing=point_spacing,
            reuse_limit=reuse_limit,
            can_chunk=can_chunk,
            costs=costs,
            residency=residency,
            recorder=Recorder(residency, costs, page_tokens),
            finisher=self.finisher,
        )

    def restore(self) -> None:
        """Take up what an earlier run left on disk. Only at the start, while the cache is empty."""
        restore(self.forest, self.residency, self.clock)

    def begin(
        self,
        ids: Sequence[int] | bytes,
        *,
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        max_new_tokens: int = 0,
        keep: bool = False,
        store: bool = True,
    ) -> Session:
        """Find what is known of a prompt, let a lane stand on it, and return the session that goes on from there.

        The session may have to load first. Raises LanesBusy if no lane is idle, DoesNotFit if the budget cannot hold
        prompt and answer; then nothing was taken from others.
        """
        prompt = pack(ids)
        total = num_tokens(prompt)
        if total == 0:
            raise RequestError("the prompt has 0 tokens, and needs at least 1")
        captures = self.costs.choose(boundaries, total)
        reuses = self._reuses(total)
        trie = self.forest.open(salt)
        try:
            adoption = self._adopter.adopt(trie, prompt, salt, total + max_new_tokens, reuses=reuses)
        except BaseException:
            self.residency.evictor.forget_if_empty(trie)
            raise
        return Session(self._context, adoption, prompt, salt, stores=reuses and store, captures=captures, keep=keep)

    def _reuses(self, total: int) -> bool:
        return self.is_enabled and not self._context.is_beyond_limit(total)

    def count_reusable(self, ids: Sequence[int] | bytes, salt: str = "") -> int:
        """How many tokens of this prompt would be reused now, changing nothing."""
        prompt = pack(ids)
        if not prompt or not self._reuses(num_tokens(prompt)):
            return 0
        return self._adopter.count_reusable(self.forest.find(salt), prompt, salt)

    def needs_loading(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether a session for this prompt would have to read from disk now. A lane must be idle."""
        prompt = pack(ids)
        if not prompt or self.memory.disk is None or not self._reuses(num_tokens(prompt)):
            return False
        return self._adopter.needs_loading(self.forest.find(salt), prompt, salt)

    def reuse_version(self, salt: str = "") -> ReuseVersion:
        """What `count_reusable` depends on besides the prompt. Costs O(lanes), and no match."""
        trie = self.forest.find_known(salt)
        return ReuseVersion(trie, 0 if trie is None else trie.version, self.lanes.version)

    def is_kept(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether there is a restore point at the end of these tokens that was asked to be kept."""
        found = self.forest.find(salt).match(ids)
        point = found.node.points.get(num_tokens(pack(ids)))
        return point is not None and point.kept

    def clear(self) -> None:
        """Forget everything that no busy lane stands on; what was on disk is deleted for good, all of it."""
        self.finisher.reset_duel()
        self.clear_memory()
        if self.memory.disk is not None:
            for trie in self.forest.tries.values():
                forget_disk(trie)
            self.memory.disk.clear()

    def clear_memory(self) -> None:
        """Clear idle lanes and drop everything that no busy lane stands on."""
        self.lanes.clear_idle()
        for trie in list(self.forest.tries.values()):
            self.residency.evictor.clear(trie)

    def flush(self, salt: str | None = None) -> bool:
        """Hand everything that the disk lacks to it, or one salt's, and wait until it is written; False if that failed."""
        disk = self.memory.disk
        if disk is None:
            return True
        found = None if salt is None else self.forest.find(salt)
        tries = [trie for trie in self.forest.tries.values() if found in (None, trie)]
        for trie in tries:
            self.residency.saver.save_all(trie)
        is_safe = disk.flush()
        for trie in tries:
            trie.memory.drop_replaced()
        return disk.flush() and is_safe  # the second time without files that newer ones replaced

    def detach_disk(self) -> None:
        """Release all memory, and forget the disk; what was written there stays there."""
        self.memory.detach_disk(self.forest.items())
        self.clear_memory()

    def close(self) -> None:
        """Write everything to disk and release all memory. Only at the end, when no lane is busy."""
        disk = self.memory.disk
        if disk is not None:
            self.flush()
            disk.close()
        self.detach_disk()

    def check(self) -> None:
        """Assert what the module's docstring says."""
        room = self.residency.room
        self.forest.check()
        self.memory.check(list(self.forest.items()))
        self.residency.loader.check()
        assert room.budget_bytes is None or room.used_bytes <= room.budget_bytes
        assert len(self.forest.pins) == self.lanes.num_busy
