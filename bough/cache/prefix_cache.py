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

from bough.cache.adoption import adopt, best_offset
from bough.cache.memory import Memory
from bough.cache.node import Node, Pin, Reason
from bough.cache.record import attach_captures, extend, fill_holes, supersede, thin
from bough.cache.session import Capture, Session, Slot
from bough.cache.state import PAGE_TOKENS, Kind, Lane, PageStore, Source
from bough.cache.tokens import num_tokens, pack
from bough.cache.trie import Trie
from bough.errors import DoesNotFit, EngineError, LanesBusy, RequestError
from bough.types import Boundary, Mark

log = logging.getLogger(__name__)

REDUNDANT_SHARE = 0.2
"""Redundant restore points may take this share of their path's row bytes; what is beyond goes at once."""

_REASONS = {
    Mark.SYSTEM_END: Reason.SYSTEM,
    Mark.LAST_USER_START: Reason.LAST_USER,
    Mark.MESSAGE_END: Reason.MESSAGE,
}


class PrefixCache:
    """Begins and ends sessions over one set of lanes, one budget, and one trie for each salt."""

    def __init__(
        self,
        store: PageStore,
        lanes: Sequence[Lane],
        *,
        budget_bytes: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        clock: Callable[[], float] = time.monotonic,
        is_enabled: bool = True,
        can_chunk: bool = True,
        reuse_limit: int | None = None,
    ) -> None:
        self.groups = tuple(store.groups)
        self.page_tokens = page_tokens
        self.budget_bytes = budget_bytes
        self._can_chunk = can_chunk
        self.memory = Memory(store, page_tokens)
        self.slots = [Slot(lane) for lane in lanes]
        self.tries: dict[str, Trie] = {}
        self.clock = clock
        self.is_enabled = is_enabled and can_chunk
        self._reuse_limit = reuse_limit

    @property
    def lane_bytes(self) -> int:
        return sum(slot.lane.nbytes for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold."""
        return self.memory.tree_bytes + self.lane_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that one more token on a path costs, restore points left out."""
        return sum(group.bytes_per_token for group in self.groups if group.kind is Kind.FULL)

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
        reuses = self.is_enabled and not self._is_beyond_limit(total)
        trie = self._trie(salt)
        try:
            adoption = adopt(self, trie, prompt, salt, total + max_new_tokens, reuses=reuses)
        except BaseException:
            self._forget_empty(salt)
            raise
        session = Session(self, adoption, trie, salt, prompt, stores=reuses and store, keep=keep)
        self._schedule(session, boundaries)
        return session

    def _is_beyond_limit(self, total: int) -> bool:
        return self._reuse_limit is not None and total > self._reuse_limit

    def can_chunk(self, total: int) -> bool:
        """Whether a prompt of so many tokens may be evaluated in several runs."""
        return self._can_chunk and not self._is_beyond_limit(total)

    def _trie(self, salt: str) -> Trie:
        return self.tries.setdefault(salt, Trie(self.memory, self.page_tokens))

    def _schedule(self, session: Session, boundaries: Sequence[Boundary]) -> None:
        """Plan the restore points of a session: only where a group needs them, or one was asked to be kept."""
        total = session.prompt_tokens
        if session.keep:
            session.schedule(total, Reason.END, kept=True)
        if not self.memory.needs_points:
            return
        for boundary in self._affordable(boundaries, total):
            session.schedule(min(boundary.offset, total), _REASONS[boundary.mark])
        if session.cached < session.matched:
            session.schedule(min(session.matched, total - 1), Reason.BRANCH)
        session.schedule(total - 1, Reason.PROMPT_END)

    def _affordable(self, boundaries: Sequence[Boundary], total: int) -> list[Boundary]:
        """The boundaries without those whose points would be redundant and over their share: the deepest stay."""
        plain = [each for each in boundaries if each.mark is Mark.MESSAGE_END]
        allowance = self.redundant_allowance(total)
        for boundary in sorted(plain, key=lambda each: -each.offset):
            allowance -= self.point_bytes(boundary.offset)
            if allowance < 0:
                plain.remove(boundary)
        return [each for each in boundaries if each.mark is not Mark.MESSAGE_END or each in plain]

    def redundant_allowance(self, total: int) -> float:
        """Bytes that redundant restore points may take on a path of `total` tokens."""
        return float("inf") if self.budget_bytes is None else REDUNDANT_SHARE * total * self.row_bytes

    def point_bytes(self, offset: int) -> int:
        """What a restore point at `offset` costs at the most, beside the rows of full attention."""
        return sum(group.needed_bytes(offset) for group in self.groups if group.kind is not Kind.FULL)

    @property
    def has_resting_lane(self) -> bool:
        return any(not slot.is_busy for slot in self.slots)

    def resting(self) -> list[Slot]:
        """The lanes that can serve a request, least recently used first."""
        slots = [slot for slot in self.slots if not slot.is_busy]
        if not slots:
            raise LanesBusy(len(self.slots))
        return sorted(slots, key=lambda slot: slot.last_used)

    def make_room(self, needed_bytes: int, spare: Slot | None = None) -> bool:
        """Bring used + needed within the budget: clear resting lanes, then evict. False if that is not possible."""
        if self.budget_bytes is None:
            return True
        while self.used_bytes + needed_bytes > self.budget_bytes:
            if not (self._clear_resting_lane(spare) or self.memory.evict_one()):
                return False
        return True

    def _clear_resting_lane(self, spare: Slot | None) -> bool:
        slots = [slot for slot in self.slots if not slot.is_busy and slot is not spare and slot.lane.nbytes]
        if not slots:
            return False
        self.clear_slot(min(slots, key=lambda slot: slot.last_used))
        return True

    def clear_slot(self, slot: Slot) -> None:
        slot.lane.clear()
        slot.tokens = b""

    def reserve(self, slot: Slot, total_tokens: int) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that."""
        if not self.make_room(slot.lane.bytes_for(total_tokens) - slot.lane.nbytes, spare=slot):
            return False
        slot.lane.reserve(total_tokens)
        return True

    def refuse(self, needed_bytes: int) -> DoesNotFit:
        assert self.budget_bytes is not None
        busy = sum(slot.lane.nbytes for slot in self.slots if slot.is_busy)
        return DoesNotFit(needed_bytes, self.budget_bytes, busy)

    def move_pin(self, trie: Trie, pin: Pin, node: Node, offset: int) -> None:
        """Move a pin, and offer the place that it leaves to eviction again."""
        left = pin.node
        pin.move(node, offset)
        if left is not node:
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
        """Make room for rows and captures; if all do not fit, for as many whole pages as do."""
        at = session.pin.offset
        needed = (end - at) * self.row_bytes + sum(self.point_bytes(capture.offset) for capture in due)
        if self.make_room(needed, spare=session.slot):
            return end, due
        assert self.budget_bytes is not None
        if self.memory.needs_points or not self.row_bytes:
            return at, []
        fitting = at + max(0, self.budget_bytes - self.used_bytes) // self.row_bytes
        return max(at, min(end, fitting // self.page_tokens * self.page_tokens)), []

    def end(self, session: Session) -> None:
        """Close a session: a last record if its lane is whole, recency, and the lane rests."""
        slot = session.slot
        try:
            if session.is_whole:
                if self.memory.needs_points and session.offset:
                    session.captures[session.offset] = self._last_capture(session)
                self.record(session)
                slot.tokens = session.tokens.tobytes() if session.stores else b""
                slot.salt = session.salt
            else:
                self._repair(session)
        except EngineError as error:
            log.warning("a finished request could not be recorded: %s", error)
            self.clear_slot(slot)
        finally:
            self._rest(session)
            self._forget_empty(session.salt)

    def _last_capture(self, session: Session) -> Capture:
        known = session.captures.get(session.offset, Capture(session.offset, Reason.END))
        return Capture(session.offset, max(known.reason, Reason.END), known.kept)

    def _repair(self, session: Session) -> None:
        """After a failed forward pass: full attention alone goes back to the last good offset, other lanes are cleared."""
        slot, at = session.slot, session.offset
        if self.memory.needs_points or not session.stores:
            self.clear_slot(slot)
            return
        slot.lane.adopt(at, {group: Source(live=at) for group in self.groups})
        slot.tokens, slot.salt = session.tokens.tobytes(), session.salt

    def _rest(self, session: Session) -> None:
        now, node = self.clock(), session.pin.node
        session.slot.is_busy = False
        session.slot.last_used = now
        path = node.path()
        for each in path:
            each.touch(now)
        supersede(path)
        thin(self, session.trie, path)
        node.pins.discard(session.pin)
        for each in reversed(path):
            self.memory.settle(session.trie, each)

    def _forget_empty(self, salt: str) -> None:
        trie = self.tries.get(salt)
        if trie is not None and trie.root.is_leaf and not trie.root.pins:
            del self.tries[salt]

    def look(self, ids: Sequence[int] | bytes, salt: str = "") -> int:
        """How many tokens of this prompt would be reused now, changing nothing."""
        if not self.is_enabled or salt not in self.tries:
            return 0
        return best_offset(self, self.tries[salt].match(ids), pack(ids), salt)

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
            "lane_bytes": self.lane_bytes,
            "used_bytes": self.used_bytes,
            "budget_bytes": self.budget_bytes,
            "lanes": len(self.slots),
            "busy_lanes": sum(slot.is_busy for slot in self.slots),
            "evicted_points": counts.points,
            "evicted_tokens": counts.tokens,
        }

    def clear(self) -> None:
        """Forget everything that no busy lane stands on."""
        for slot in self.slots:
            if not slot.is_busy:
                self.clear_slot(slot)
        for salt, trie in list(self.tries.items()):
            trie.clear()
            self._forget_empty(salt)

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for trie in self.tries.values():
            trie.check()
        nodes = [node for trie in self.tries.values() for node in trie.walk()]
        assert sum(node.nbytes for node in nodes) == self.memory.tree_bytes
        assert self.budget_bytes is None or self.used_bytes <= self.budget_bytes
        assert sum(len(node.pins) for node in nodes) == sum(slot.is_busy for slot in self.slots)
