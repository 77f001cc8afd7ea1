"""The prefix cache: one tree, its memory and its lanes, as requests see them.

`begin` matches a prompt, plans the deepest offset that every group can be restored to, makes room and lets a lane adopt it.
It returns a `Session`, which may first have to load: content on disk is read by other threads. The session publishes what
the lane computes, until it is closed. One thread at a time calls, and `begin` never waits for the disk.

Always true between calls (`check` asserts it):
- the tries hold, each for itself, what `Trie.check` says, and their bytes are what `Memory` counts, tier by tier;
- lanes and tree together stay within the device's budget, and the tree within the host's and the disk's;
- content that is on disk alone has a saved file there, unless that was found damaged;
- the bytes reserved for loading are those that the loads under way still wait for;
- each busy lane has one hold, and no other lane has any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bough.cache.adoption import Adopter
from bough.cache.finish import Finisher
from bough.cache.record import POINT_SPACING, CaptureCosts, Recorder
from bough.cache.residency import Clock, Lanes, Memory, Rates, Residency, SaltForest, SaltTrie, Tiers
from bough.cache.residency.policy import Policy
from bough.cache.residency.saving import SavePass, forget_disk
from bough.cache.restore import attach, restore
from bough.cache.session import Session, SessionContext
from bough.cache.steps import RunSteps, Steps, run_at_once
from bough.cache.tree.address import DiskFile, PointRecord
from bough.cache.tree.forest import Forest
from bough.cache.tree.state import PAGE_TOKENS, Lane, PageStore
from bough.cache.tree.tokens import num_tokens, pack
from bough.errors import RequestError
from bough.tokens import Tokens
from bough.types import Boundary

SEND_WITHIN_S = 60.0
"""How long `flush` waits for the shared store."""

SAVE_PASSES = 4
"""How often `save` looks for items that requests have left unsaved meanwhile."""


@dataclass(frozen=True)
class ReuseVersion:
    """The state of one salt's trie and of the lanes. While two are equal, the same tokens of any prompt are reusable."""

    trie: SaltTrie | None
    trie_version: int
    lanes_version: int


@dataclass(frozen=True)
class SaveResult:
    """Whether the disk took and wrote what it had room for, and how many items in memory it has no room for."""

    is_written: bool
    num_without_room: int = 0


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
        captures = self._costs.choose(boundaries, total)
        reuses = self._reuses(total)
        trie = self.forest.open(salt)
        try:
            adoption = self._adopter.adopt(trie, prompt.key, salt, total + max_new_tokens, reuses=reuses and reuse)
        except BaseException:
            self.residency.evictor.forget_if_empty(trie)
            raise
        return Session(
            self._context, adoption, prompt, salt, keeps_state=reuses and keep_state, captures=captures, keep=keep
        )

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

    def clear(self, salt: str | None = None, run: RunSteps = run_at_once) -> None:
        """Forget everything that no busy lane stands on, or one salt's; delete all of it on disk and in the store.

        Waits for that on the calling thread; `run` runs what touches the tree. Raises DiskError or StoreError if content
        may be left, as on a disk that is only read.
        """
        shared = self.memory.shared
        with ExitStack() as waits:  # the store is waited for even if the disk fails
            wait_for_disk = run(lambda: self._clear(salt))
            if shared is not None:
                waits.callback(shared.clear(salt))
            wait_for_disk()

    def _clear(self, salt: str | None) -> Steps[Callable[[], None]]:
        """Forget everything, or one salt's; returns a function that waits for the disk."""
        if salt is None:
            self.finisher.reset_duel()
        yield from self._clear_memory(salt)
        disk = self.memory.disk
        if disk is None:
            return lambda: None
        for trie in self._tries(salt):
            forget_disk(trie)  # not interrupted: everything that has a file then is deleted
        return disk.clear(None if salt is None else disk.root(salt))

    def _clear_memory(self, salt: str | None = None) -> Steps[None]:
        """Clear idle lanes and drop everything that no busy lane stands on."""
        for slot in self.lanes.idle():
            if salt in (None, slot.salt):
                slot.clear()
        for trie in self._tries(salt):
            yield from self.residency.evictor.clear(trie)

    def _tries(self, salt: str | None) -> list[SaltTrie]:
        """The tries of all salts, or of one."""
        found = None if salt is None else self.forest.find(salt)
        return [trie for trie in self.forest.tries.values() if found in (None, trie)]

    def flush(self, salt: str | None = None, run: RunSteps = run_at_once) -> bool:
        """Hand everything that the disk lacks to it, or one salt's, and wait until it is written; False if that failed.

        Waits on the calling thread, for uploads to the shared store too; `run` runs what touches the tree.
        """
        disk, shared = self.memory.disk, self.memory.shared
        is_sent = shared is None or shared.uploader.settle(SEND_WITHIN_S)
        if disk is None:
            return is_sent
        is_taken = not run(lambda: self._save_all(salt)).num_refused
        is_safe = disk.flush() and is_taken
        run(lambda: self._drop_replaced(salt))
        return disk.flush() and is_safe and is_sent  # the second time without files that newer ones replaced

    def save(self, salt: str, run: RunSteps) -> SaveResult:
        """Write everything of a salt that the disk lacks, while requests go on.

        Repeated a few times, because requests may cut a page that is not written yet: without its parts, pages after them
        could not be found from the root. A disk that is only read has no room for anything.
        """
        disk = self.memory.disk
        assert disk is not None
        if disk.read_only:
            return SaveResult(is_written=True, num_without_room=run(lambda: self._drop_replaced(salt)))
        for _ in range(SAVE_PASSES):
            done = run(lambda: self._save_all(salt))
            if not disk.settle(disk.root(salt)):
                return SaveResult(is_written=False)
            if not done.num_items:
                break
        num_without_room = run(lambda: self._drop_replaced(salt))
        return SaveResult(not done.num_refused, num_without_room)

    def _save_all(self, salt: str | None) -> Steps[SavePass]:
        num_items = num_refused = 0
        for trie in self._tries(salt):
            done = yield from self.residency.saver.save_all(trie)
            num_items += done.num_items
            num_refused += done.num_refused
        return SavePass(num_items, num_refused)

    def _drop_replaced(self, salt: str | None) -> Steps[int]:
        """Drop files that newer ones have replaced; returns how many items the disk has no room for."""
        num_without_room = 0
        for trie in self._tries(salt):
            trie.memory.drop_replaced()
            num_without_room += yield from self.residency.saver.count_without_room(trie)
        return num_without_room

    def detach_disk(self) -> None:
        """Release all memory, and forget disk and store; content that was written there stays there."""
        self.memory.detach_disk(self.forest.items())
        run_at_once(self._clear_memory)

    def close(self) -> None:
        """Write everything to disk and release all memory. Only at the end, when no lane is busy."""
        disk, shared = self.memory.disk, self.memory.shared
        if shared is not None:
            shared.close()  # first: it reads what is in memory
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
        if self.memory.shared is not None:
            self.memory.shared.check()
        assert room.budget_bytes is None or room.used_bytes <= room.budget_bytes
        assert len(self.forest.holds) == self.lanes.num_busy
