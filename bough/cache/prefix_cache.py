"""The prefix cache: tries and memory, shared by all lanes.

`begin` matches a prompt, plans the deepest offset that every group can be restored to, makes room and lets a lane adopt it.
`record` hands what a lane holds to the tree: after each prefill chunk, and when a session ends. One thread at a time calls.

Always true between calls (`check` asserts it):
- the tries hold, each for itself, what `Trie.check` says, and their bytes are what `Memory` counts, place by place;
- lanes and tree together stay within the device's budget, and the tree within the host's and the disk's;
- what lies on disk alone has a copy there that was saved, and is there unless it was found damaged;
- only busy lanes pin anything, each exactly one place, at or before the lane's offset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.cache.admin.stats import Stats, stats
from bough.cache.adoption import adopt, reusable
from bough.cache.captures import POINT_SPACING, Capture, CaptureCosts
from bough.cache.finish import rest
from bough.cache.record import attach_captures, extend, fill_holes, fit
from bough.cache.residency.evictor import Evictor, memory_of
from bough.cache.residency.memory import Memory, Tiers
from bough.cache.residency.policy import LRU, Policy
from bough.cache.residency.rates import Rates
from bough.cache.residency.room import Room
from bough.cache.residency.saving import lose_disk, save, save_all
from bough.cache.residency.shadow import Duel
from bough.cache.session import Session, Slot
from bough.cache.tree.node import Node, Pin, Point
from bough.cache.tree.reason import Reason
from bough.cache.tree.state import PAGE_TOKENS, Lane, PageStore, Place, Source
from bough.cache.tree.tokens import num_tokens, pack
from bough.cache.tree.trie import Trie
from bough.errors import EngineError, LanesBusy, RequestError
from bough.types import Boundary

log = logging.getLogger(__name__)

EXPIRE_EVERY_S = 60.0


@dataclass
class LoadCounts:
    """What could not be brought back: copies that were not what they should be, and loads without memory for them."""

    misses: int = 0
    failed_loads: int = 0


class PrefixCache:
    """Begins and ends sessions over one set of lanes, one budget for each place, and one trie for each salt."""

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
        self.groups = tuple(store.groups)
        self.page_tokens = page_tokens
        self.slots = [Slot(lane) for lane in lanes]
        self.tiers = tiers
        self.memory = Memory(store, tiers)
        pins: set[Pin] = set()
        self.evictor = Evictor(
            self.memory,
            page_tokens,
            policy or LRU,
            pins=pins,
            salt_share=salt_share,
            to_wall=lambda at: wall() - (clock() - at),
            tries=lambda: self.tries.values(),
            on_empty=self.forget_if_empty,
        )
        self.duel = Duel(page_tokens)
        self.policy = policy  # None: the duel decides
        self.room = Room(self.evictor, self.slots, budget_bytes, pins)
        self.costs = CaptureCosts(self.groups, is_bounded=budget_bytes is not None)
        self.tries: dict[str, Trie] = {}
        self._can_chunk = can_chunk
        self.clock = clock
        self.is_enabled = is_enabled and can_chunk
        self._reuse_limit = reuse_limit
        self.rates = rates or Rates(clock)
        self.wall = wall
        self.counts = LoadCounts()
        self.parted: list[
            tuple[Trie, Node]
        ] = []  # tails of edges that were split: a page of theirs may have to be saved anew
        self.keeps_on_device = keeps_on_device  # False: nothing but what lanes hold
        self._ttl_s = ttl_s
        self._point_spacing = point_spacing
        self._expire_at = clock()

    def open_trie(self, salt: str) -> Trie:
        """The trie of a salt, made if there is none. One that an earlier run left on disk is known by its root alone."""
        trie = self.tries.get(salt)
        if trie is None:
            root = self.memory.disk.root(salt) if self.memory.disk is not None else b""
            trie = self.tries.pop(unnamed(root), None) if root else None
            trie = trie or self.make_trie(root)
            trie.salt = salt
            self.tries[salt] = trie
        return trie

    def make_trie(self, disk_root: bytes) -> Trie:
        """A trie with an account of its own, which nobody knows yet."""
        trie = Trie(self.memory.open_account(), self.page_tokens)
        trie.disk_root = disk_root
        trie.on_drop = self._drop_note
        return trie

    def adopt_trie(self, trie: Trie) -> None:
        """Take up a trie that was built from disk; its salt is not known, except that it may be the empty one."""
        assert self.memory.disk is not None
        if not trie.root.is_leaf:
            is_empty_salt = trie.disk_root == self.memory.disk.root("")
            self.tries["" if is_empty_salt else unnamed(trie.disk_root)] = trie

    def _drop_note(self, point: Point) -> None:
        if point.noted is not None and self.memory.disk is not None:
            self.memory.disk.drop_point(point.noted.address)

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

        Raises LanesBusy if no lane rests, DoesNotFit if the budget cannot hold prompt and answer.
        """
        prompt = pack(ids)
        total = num_tokens(prompt)
        if total == 0:
            raise RequestError("the prompt has 0 tokens, and needs at least 1")
        captures = self.costs.choose(boundaries, total)
        reuses = self._reuses(total)
        trie = self.open_trie(salt)
        try:
            adoption = adopt(self, trie, prompt, salt, total + max_new_tokens, reuses=reuses)
        except BaseException:
            self.forget_if_empty(trie)
            raise
        session = Session(self, adoption, trie, salt, prompt, stores=reuses and store, keep=keep)
        try:
            self._schedule(session, captures)
        except BaseException:
            session.close()
            raise
        return session

    def _reuses(self, total: int) -> bool:
        return self.is_enabled and not self._is_beyond_limit(total)

    def _is_beyond_limit(self, total: int) -> bool:
        return self._reuse_limit is not None and total > self._reuse_limit

    def can_chunk(self, total: int) -> bool:
        """Whether a prompt of so many tokens may be evaluated in several runs."""
        return self._can_chunk and not self._is_beyond_limit(total)

    def _schedule(self, session: Session, captures: Sequence[Capture]) -> None:
        """Plan the restore points of a session: only where a group needs them, or one was asked to be kept."""
        total = session.prompt_tokens
        if session.keep:
            session.schedule(total, Reason.END, kept=True)
        if not self.costs.needs_points:
            return
        for capture in captures:
            session.schedule(capture.offset, capture.reason)
        for offset in range(self._point_spacing, total, self._point_spacing):
            session.schedule(offset, Reason.BRANCH)
        if session.cached < session.matched or session.is_branch:
            session.schedule(min(session.matched, total - 1), Reason.BRANCH)
        session.schedule(total - 1, Reason.PROMPT_END)

    def resting(self) -> list[Slot]:
        """The lanes that can serve a request, least recently used first."""
        slots = [slot for slot in self.slots if not slot.is_busy]
        if not slots:
            raise LanesBusy(len(self.slots))
        return sorted(slots, key=lambda slot: slot.last_used)

    def add_pin(self, pin: Pin) -> None:
        self.room.pins.add(pin)
        pin.node.pins.add(pin)

    def drop_pin(self, trie: Trie, pin: Pin) -> None:
        """Let go of what a lane stood on, and offer it to eviction."""
        self.room.pins.discard(pin)
        pin.node.pins.discard(pin)
        self._offer_path(trie, pin.node)

    def move_pin(self, trie: Trie, pin: Pin, node: Node, offset: int) -> None:
        """Move a pin, and offer the place that it leaves to eviction again."""
        left = pin.node
        pin.move(node, offset)
        self._offer_path(trie, left)

    def _offer_path(self, trie: Trie, node: Node) -> None:
        """Offer a node; and those above it, where what they hold could be moved while a lane stands below."""
        for each in [node] if self.tiers is None else [*node.path(), node]:
            self.evictor.offer(trie, each)

    def make_load_room(self, trie: Trie, nbytes: int) -> int:
        """Make room for what is to be read from disk; returns how much of it will have to fit on the device."""
        if self.tiers is None or self.tiers.load_place is Place.DEVICE:
            return nbytes
        self.evictor.make_host_room(nbytes, trie)
        return 0

    def record(self, session: Session) -> None:
        """Bring the tree up to what the session's lane holds: rows it lacks, holes, and the captures that are due."""
        if not session.stores:
            return
        end = session.offset if self._reuse_limit is None else min(session.offset, self._reuse_limit)
        found = session.trie.match(session.tokens[:end].tobytes(), start=session.pin)
        self.move_pin(session.trie, session.pin, found.node, found.length)
        due = [capture for capture in session.captures.values() if capture.offset <= end]
        for capture in due:
            del session.captures[capture.offset]
        end, due = fit(self, session, end, due)
        extend(self, session, end)
        attach_captures(self, session, due)
        fill_holes(self, session)
        save(self, session.trie, session.tokens[: session.pin.offset].tobytes(), whole_pages=True)

    def end(self, session: Session) -> None:
        """Close a session: a last record if its lane is whole, recency, and the lane rests."""
        try:
            if session.is_whole:
                self._record_last(session)
            else:
                self._repair(session)
        except (EngineError, MemoryError) as error:
            log.warning("a finished request could not be recorded: %s", error)
            self.room.clear_slot(session.slot)
        finally:
            rest(self, session)
            self.forget_if_empty(session.trie)

    def _record_last(self, session: Session) -> None:
        if self.costs.needs_points and session.offset:
            session.captures[session.offset] = self._last_capture(session)
        self.record(session)
        if session.stores:
            session.slot.tokens = session.tokens.tobytes()

    def _last_capture(self, session: Session) -> Capture:
        known = session.captures.get(session.offset, Capture(session.offset, Reason.END))
        return Capture(session.offset, max(known.reason, Reason.END), known.kept)

    def _repair(self, session: Session) -> None:
        """After a failed forward pass: full attention alone goes back to the last good offset, other lanes are cleared."""
        slot, at = session.slot, session.offset
        if self.costs.needs_points or not session.stores:
            self.room.clear_slot(slot)
            return
        slot.lane.adopt(at, {group: Source(live=at) for group in self.groups})
        slot.tokens = session.tokens.tobytes()

    def forget_if_empty(self, trie: Trie) -> None:
        """Drop a root that holds nothing and on which nobody stands."""
        if trie.root.is_leaf and not trie.root.pins:
            for name in [name for name in (trie.salt, unnamed(trie.disk_root)) if self.tries.get(name) is trie]:
                del self.tries[name]
            self.evictor.order.forget(trie)

    def look(self, ids: Sequence[int] | bytes, salt: str = "") -> int:
        """How many tokens of this prompt would be reused now, changing nothing."""
        prompt = pack(ids)
        if not prompt or not self._reuses(num_tokens(prompt)):
            return 0
        return reusable(self, self.find_trie(salt), prompt, salt)

    def is_kept(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether there is a restore point at the end of these tokens that was asked to be kept."""
        found = self.find_trie(salt).match(ids)
        point = found.node.points.get(num_tokens(pack(ids)))
        return point is not None and point.kept

    @property
    def total_budget_bytes(self) -> int:
        """What all places together may hold; only where the device has a budget."""
        assert self.room.budget_bytes is not None
        below = 0 if self.tiers is None else self.tiers.host_bytes * self.tiers.has_host
        return self.room.budget_bytes + below + (self.memory.disk.budget_bytes if self.memory.disk is not None else 0)

    def find_trie(self, salt: str) -> Trie:
        """The trie of a salt, to look at; an empty one if there is none."""
        disk = self.memory.disk
        return self.tries.get(salt) or (disk and self.tries.get(unnamed(disk.root(salt)))) or Trie()

    def stats(self) -> Stats:
        """Counts and bytes of everything that is kept, and what was let go so far."""
        return stats(self)

    def clear(self) -> None:
        """Forget everything that no busy lane stands on; what was on disk is deleted for good, all of it."""
        self.duel = Duel(self.page_tokens)
        self._clear()
        if self.memory.disk is not None:
            for trie in self.tries.values():
                lose_disk(trie)
            self.memory.disk.clear()

    def _clear(self) -> None:
        for slot in self.slots:
            if not slot.is_busy:
                self.room.clear_slot(slot)
        for trie in list(self.tries.values()):
            trie.clear()
            for node in trie.walk():
                self.evictor.offer(trie, node)
            self.forget_if_empty(trie)

    def expire(self) -> None:
        """Forget, once a minute, what nobody used for as long as state may live."""
        now = self.clock()
        if self._ttl_s is None or now < self._expire_at:
            return
        self._expire_at = now + min(EXPIRE_EVERY_S, self._ttl_s)
        for trie in list(self.tries.values()):
            for node in reversed(list(trie.walk())):
                if node.parent and node.is_leaf and not node.pins and node.last_used < now - self._ttl_s:
                    self.evictor.remove(trie, node)

    def is_aging(self, seconds: float) -> bool:
        """Whether a note of use that is so old may let what it is of die too early."""
        return self._ttl_s is not None and seconds > self._ttl_s / 4

    def flush(self, salt: str | None = None) -> bool:
        """Hand everything that the disk lacks to it, or one salt's, and wait until it is written; False if that failed."""
        disk = self.memory.disk
        if disk is None:
            return True
        found = None if salt is None else self.find_trie(salt)
        tries = [trie for trie in self.tries.values() if found in (None, trie)]
        for trie in tries:
            save_all(self, trie)
        is_safe = disk.flush()
        for trie in tries:
            memory_of(trie).prune()
        return disk.flush() and is_safe  # now without what newer copies have replaced

    def close(self) -> None:
        """Bring everything to disk, let go of it, and give all memory back. Only at the end, when no lane is busy."""
        disk = self.memory.disk
        if disk is not None:
            self.flush()
            disk.close()
        self.let_go()

    def let_go(self) -> None:
        """Give all memory back, and know of no disk any more; what was written there stays there."""
        self.memory.disk = None
        for trie in self.tries.values():
            memory_of(trie).disk = None
            for item in [item for node in trie.walk() for item in node.items()]:
                item.copies = {}
        self._clear()
        self.memory.num_bytes[Place.DISK] = 0

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for trie in self.tries.values():
            trie.check()
        nodes = [node for trie in self.tries.values() for node in trie.walk()]
        self.memory.check([item for node in nodes for item in node.items()])
        assert self.room.budget_bytes is None or self.room.used_bytes <= self.room.budget_bytes
        assert {pin for node in nodes for pin in node.pins} == self.room.pins
        assert len(self.room.pins) == sum(slot.is_busy for slot in self.slots)


def unnamed(disk_root: bytes) -> str:
    """The name of a trie whose salt nobody has told yet since the start. No salt has it: it is no valid text."""
    return f"\udc00{disk_root.hex()}"
