"""The prefix cache: tries and memory, shared by all lanes.

`begin` matches a prompt, plans the deepest offset that every group can be restored to, makes room and lets a lane adopt it.
`record` hands what a lane holds to the tree: after each prefill chunk, and when a session ends. One thread at a time calls.

Always true between calls (`check` asserts it):
- the tries hold, each for itself, what `Trie.check` says, and their bytes are what `Memory` counts;
- lanes and tree together stay within the budget;
- only busy lanes pin anything, each exactly one place, at or before the lane's offset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from bough.cache.adoption import adopt, reusable
from bough.cache.captures import Capture, CaptureCosts
from bough.cache.eviction import LRU, Policy
from bough.cache.memory import Memory
from bough.cache.node import Node, Pin, Reason
from bough.cache.record import attach_captures, extend, fill_holes, holds_window, supersede, thin
from bough.cache.room import Room
from bough.cache.session import Session, Slot
from bough.cache.shadow import NEVER, Duel
from bough.cache.state import PAGE_TOKENS, Kind, Lane, PageStore, Source
from bough.cache.tokens import num_tokens, pack
from bough.cache.trie import Trie
from bough.errors import EngineError, LanesBusy, RequestError
from bough.types import Boundary

log = logging.getLogger(__name__)


class PrefixCache:
    """Begins and ends sessions over one set of lanes, one budget, and one trie for each salt."""

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
    ) -> None:
        self.groups = tuple(store.groups)
        self.page_tokens = page_tokens
        self.slots = [Slot(lane) for lane in lanes]
        self.memory = Memory(store, page_tokens, policy or LRU, on_empty=self._forget)
        self.duel = Duel(page_tokens)
        self._policy = policy  # None: the duel decides
        self.room = Room(self.memory, self.slots, budget_bytes)
        self.costs = CaptureCosts(self.groups, is_bounded=budget_bytes is not None)
        self.tries: dict[str, Trie] = {}
        self._can_chunk = can_chunk
        self.clock = clock
        self.is_enabled = is_enabled and can_chunk
        self._reuse_limit = reuse_limit

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
        trie = self.tries.setdefault(salt, Trie(self.memory, self.page_tokens, salt))
        try:
            adoption = adopt(self, trie, prompt, salt, total + max_new_tokens, reuses=reuses)
        except BaseException:
            self._forget(trie)
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
        self.memory.offer(trie, pin.node)

    def move_pin(self, trie: Trie, pin: Pin, node: Node, offset: int) -> None:
        """Move a pin, and offer the place that it leaves to eviction again."""
        left = pin.node
        pin.move(node, offset)
        self.memory.offer(trie, left)

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
        end, due = self._fit(session, end, due)
        extend(self, session, end)
        attach_captures(self, session, due)
        fill_holes(self, session)

    def _fit(self, session: Session, end: int, due: list[Capture]) -> tuple[int, list[Capture]]:
        """Make room for rows and captures. If not all fit, the least worthy captures are given up, then rows.

        Rows without a restore point serve nobody in a model that needs those: room for one is counted in.
        """
        at, kept = session.pin.offset, sorted(due, key=lambda capture: capture.worth)
        rows = (end - at) * self.costs.row_bytes
        while True:
            offsets = {capture.offset for capture in kept} | ({end} if self.costs.needs_points else set())
            if self.room.make(rows + self.costs.total_bytes(offsets), spare=session.slot):
                return end, kept
            if not kept or offsets == {end}:
                return self._fit_less(session, at, end)
            kept.pop(0)

    def _fit_less(self, session: Session, at: int, end: int) -> tuple[int, list[Capture]]:
        """As many whole pages as fit, with a restore point at their end where one is needed and can still be made."""
        row_bytes = self.costs.row_bytes
        if not row_bytes or any(group.kind is Kind.RECURRENT for group in self.groups):
            return at, []
        fitting = (self.room.affordable_bytes - self.costs.point_bytes(end)) // row_bytes
        less = max(at, min(end, at + fitting) // self.page_tokens * self.page_tokens)
        if not less or not all(holds_window(session, group, less) for group in self.groups):
            return at, []
        if not self.room.make((less - at) * row_bytes + self.costs.point_bytes(less), spare=session.slot):
            return at, []
        return less, [Capture(less, Reason.END)] if self.costs.needs_points else []

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
            self._rest(session)
            self._forget(session.trie)

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

    def _rest(self, session: Session) -> None:
        now, path = self.clock(), session.pin.node.path()
        session.slot.is_busy = False
        session.slot.last_used = now
        self.drop_pin(session.trie, session.pin)
        for node in path:
            node.touch(now)
        self._note_use(session, path, now)
        supersede(path)
        thin(self, session.trie, path)
        for node in reversed(path):
            self.memory.settle(session.trie, node)

    def _note_use(self, session: Session, path: Sequence[Node], now: float) -> None:
        """Tell the duel of a request and evict by its winner; nodes that are new learn when their first page was here."""
        before: list[float] = []
        page_bytes = self.costs.row_bytes * self.page_tokens
        if self.room.budget_bytes is not None and page_bytes and session.stores:
            capacity = max(0, self.room.budget_bytes - self.room.lane_bytes) // page_bytes
            before = self.duel.note(session.prompt, session.tokens.tobytes(), session.salt, now, capacity)
            self.memory.use(self._policy or self.duel.policy)
        for node in path:
            if node.hits == 1:
                page = node.start // self.page_tokens
                node.previous_used = before[page] if page < len(before) else NEVER

    def _forget(self, trie: Trie) -> None:
        """Drop a root that holds nothing and on which nobody stands."""
        if trie.root.is_leaf and not trie.root.pins and self.tries.get(trie.salt) is trie:
            del self.tries[trie.salt]

    def look(self, ids: Sequence[int] | bytes, salt: str = "") -> int:
        """How many tokens of this prompt would be reused now, changing nothing."""
        prompt = pack(ids)
        if not prompt or not self._reuses(num_tokens(prompt)):
            return 0
        return reusable(self, self.tries.get(salt) or Trie(), prompt, salt)

    def is_kept(self, ids: Sequence[int] | bytes, salt: str = "") -> bool:
        """Whether there is a restore point at the end of these tokens that was asked to be kept."""
        found = (self.tries.get(salt) or Trie()).match(ids)
        point = found.node.points.get(num_tokens(pack(ids)))
        return point is not None and point.kept

    def stats(self) -> dict[str, int | None]:
        """Counts and bytes of everything that is kept, and what was let go so far."""
        nodes = [node for trie in self.tries.values() for node in trie.walk() if not node.is_root]
        counts = self.memory.counts
        return {
            "roots": len(self.tries),
            "nodes": len(nodes),
            "tokens": sum(node.end - node.start for node in nodes),
            "pages": sum(len(pages) for node in nodes for pages in node.pages.values()),
            "restore_points": sum(len(node.points) for node in nodes),
            "kept": sum(point.kept for node in nodes for point in node.points.values()),
            "tree_bytes": self.memory.tree_bytes,
            "lane_bytes": self.room.lane_bytes,
            "used_bytes": self.room.used_bytes,
            "budget_bytes": self.room.budget_bytes,
            "lanes": len(self.slots),
            "busy_lanes": sum(slot.is_busy for slot in self.slots),
            "evicted_points": counts.points,
            "evicted_tokens": counts.tokens,
        }

    def clear(self) -> None:
        """Forget everything that no busy lane stands on."""
        self.duel = Duel(self.page_tokens)
        for slot in self.slots:
            if not slot.is_busy:
                self.room.clear_slot(slot)
        for trie in list(self.tries.values()):
            trie.clear()
            for node in trie.walk():
                self.memory.offer(trie, node)
            self._forget(trie)

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for trie in self.tries.values():
            trie.check()
        nodes = [node for trie in self.tries.values() for node in trie.walk()]
        assert sum(node.nbytes for node in nodes) == self.memory.tree_bytes
        assert self.room.budget_bytes is None or self.room.used_bytes <= self.room.budget_bytes
        assert {pin for node in nodes for pin in node.pins} == self.room.pins
        assert len(self.room.pins) == sum(slot.is_busy for slot in self.slots)
