"""The prefix cache: one tree, its memory and its lanes, as requests see them.

`begin` matches a prompt, plans the deepest offset that every group can be restored to, makes room and lets a lane adopt it.
It returns a `Session`, which may first have to load: content on disk is read by other threads. The session publishes what
the lane computes, until it is closed. One thread at a time calls, and `begin` never waits for the disk.

Always true between calls (`check` asserts it):
- the tries hold, each for itself, what `Trie.check` says, and their bytes are what `Memory` counts, tier by tier, as
  their nodes are what its census counts;
- lanes and tree together stay within the device's budget, and the tree within the host's and the disk's;
- content that is on disk alone has a saved file there, unless that was found damaged;
- the bytes reserved for loading are those that the loads under way still wait for;
- each busy lane has one hold, and no other lane has any.
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
from bough.cache.restore import attach, restore
from bough.cache.session import Session, SessionContext
from bough.cache.tree.address import DiskFile, PointRecord
from bough.cache.tree.forest import Forest
from bough.cache.tree.state import PAGE_TOKENS, Lane, PageStore
from bough.cache.upkeep import Upkeep
from bough.errors import RequestError
from bough.tokens import Tokens, num_tokens, pack
from bough.types import Boundary


@dataclass(frozen=True)
class ReuseVersion:
    """The state of one salt's trie and of the lanes. While two are equal, the same tokens of any prompt are reusable."""

    trie: SaltTrie | None
    trie_version: int
    lanes_version: int


class PrefixCache:
    """Begins sessions over one set of lanes, one budget for each tier, and one trie for each salt.

    `upkeep` clears, saves and closes all of it.
    """

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
        self.memory = Memory(store, tiers, page_tokens)
        self.forest: SaltForest = Forest(self.memory, page_tokens)
        self.lanes = Lanes(lanes)
        self.residency = residency = Residency(
            self.memory,
            self.forest,
            self.lanes,
            budget_bytes=budget_bytes,
            policy=policy,
            salt_share=salt_share,
            clock=self.clock,
            rates=rates or Rates(clock),
            ttl_s=ttl_s,
        )
        self.is_enabled = is_enabled and can_chunk
        self._costs = costs = CaptureCosts(self.memory, residency.room)
        self._adopter = Adopter(residency)
        self.finisher = Finisher(residency, costs, policy=policy, keeps_on_device=keeps_on_device)
        self.upkeep = Upkeep(residency, self.finisher)
        self._context = SessionContext(
            point_spacing=point_spacing,
            reuse_limit=reuse_limit,
            can_chunk=can_chunk,
            residency=residency,
            recorder=Recorder(residency, costs),
            finisher=self.finisher,
        )

    def restore(self) -> None:
        """Build the tree that an earlier run left on disk. Only at the start, while the cache is empty."""
        restore(self.residency)

    def attach(self, salt: str, files: Sequence[DiskFile], points: Sequence[PointRecord]) -> None:
        """Add to the tree of a salt what an import has put on disk, and drop what the tree does not need."""
        attach(self.residency, salt, files, points)

    def begin(
        self,
        ids: Sequence[int],
        *,
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        max_new_tokens: int = 0,
        keep: bool = False,
        keep_state: bool = True,
        reuse: bool = True,
    ) -> Session:
        """Find the known prefix of a prompt, let a lane adopt it, and return the session that goes on from there.

        The session may have to load first. Without `reuse` it begins at offset 0, for callers that need the logits of every
        position, and what it computes is kept as usual. Raises LanesBusy if no lane is idle, DoesNotFit if the budget
        cannot hold prompt and answer; then nothing was taken from others.
        """
        prompt = Tokens.of(ids)
        total = len(prompt)
        if total == 0:
            raise RequestError("the prompt has 0 tokens, and needs at least 1")
        captures = self._costs.choose(boundaries, total)  # before anything is taken: a boundary may make no sense
        reuses = self._reuses(total)
        trie = self.forest.open(salt)
        try:
            adoption = self._adopter.adopt(trie, prompt.key, total + max_new_tokens, reuses=reuses and reuse)
        except BaseException:
            self.residency.evictor.forget_if_empty(trie)
            raise
        keeps_state = reuses and keep_state
        return Session(self._context, adoption, prompt, captures=captures, keeps_state=keeps_state, keep=keep)

    def _reuses(self, total: int) -> bool:
        return self.is_enabled and not self._context.is_beyond_limit(total)

    def count_reusable(self, ids: Sequence[int] | bytes, salt: str = "") -> int:
        """How many tokens of this prompt would be reused now. Changes nothing."""
        prompt = pack(ids)
        if not prompt or not self._reuses(num_tokens(prompt)):
            return 0
        return self._adopter.count_reusable(self.forest.find(salt), prompt, salt)

    def needs_loading(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether a session for this prompt would have to read from disk or store now. A lane must be idle."""
        prompt = pack(ids)
        has_tier = self.memory.disk is not None or self.memory.shared is not None
        if not prompt or not has_tier or not self._reuses(num_tokens(prompt)):
            return False
        return self._adopter.needs_loading(self.forest.find(salt), prompt, salt)

    def reuse_version(self, salt: str = "") -> ReuseVersion:
        """The state that `count_reusable` depends on besides the prompt. Costs O(lanes), and no match."""
        trie = self.forest.find_known(salt)
        return ReuseVersion(trie, 0 if trie is None else trie.version, self.lanes.version)

    def is_kept(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether there is a restore point at the end of these tokens that was asked to be kept."""
        prompt = pack(ids)
        return self.forest.find(salt).match(prompt).is_kept(num_tokens(prompt))

    def check(self) -> None:
        """Assert what the module's docstring says."""
        room = self.residency.room
        self.forest.check()
        self.memory.check(list(self.forest.items()))
        self.memory.census.check([trie.memory.census for trie in self.forest.tries.values()])
        self.residency.loader.check()
        if self.memory.shared is not None:
            self.memory.shared.check()
        assert room.budget_bytes is None or room.used_bytes <= room.budget_bytes
        assert len(self.forest.holds) == self.lanes.num_busy
