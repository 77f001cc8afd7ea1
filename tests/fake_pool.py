"""A fake engine whose lanes and pages share slots, over the real arena: rows are tokens, so that every mistake shows.

A slot has no content while it is free, and poison where nothing was written since. Rows are written once, by the slot's
writer, at or after its mark.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from bough.cache.tree.state import Buffer, Group, GroupSource, Incoming, Kind, Lane, Page, State, Tier
from bough.engines.shared.pool.arena import Arena, ArenaSlot, chunk_size
from bough.engines.shared.pool.lane import PooledLane
from bough.engines.shared.pool.slot_rows import PooledRows, SlotRows
from bough.errors import EngineError
from tests.fakes import MODELS, FakeEngine

SLACK = 24
POISON = -(2**31)


class StateSlot(NamedTuple):
    """A state of the tree in a slot."""

    slot: ArenaSlot
    use: int


class TokenArena(Arena):
    """An arena with what lies in its slots: a list of tokens for rows, a tuple for a state."""

    def __init__(self, slot_bytes: Mapping[Hashable, int], num_chunks: int, chunk_bytes: int, page_tokens: int) -> None:
        super().__init__(slot_bytes, num_chunks, chunk_bytes)
        self.page_tokens = page_tokens
        self.contents: dict[ArenaSlot, Any] = {}

    def take(self, kind: Hashable, start: int = 0, *, is_promised: bool = False) -> ArenaSlot:
        slot = super().take(kind, start, is_promised=is_promised)
        assert slot not in self.contents, "a slot was handed out twice"
        self.contents[slot] = [POISON] * self.page_tokens
        return slot

    def _give_back(self, slot: ArenaSlot) -> None:
        del self.contents[slot]
        super()._give_back(slot)

    def write(self, rows: SlotRows, tokens: Sequence[int]) -> None:
        assert rows.start >= rows.slot.mark, f"rows from {rows.start} on are written, below the mark {rows.slot.mark}"
        assert len(tokens) == rows.end - rows.start
        for row, token in zip(range(rows.start, rows.end), tokens, strict=True):
            self.contents[rows.slot][row % self.page_tokens] = token

    def read(self, rows: SlotRows) -> list[int]:
        assert rows.end <= rows.slot.mark, f"rows up to {rows.end} are read, above the mark {rows.slot.mark}"
        tokens = [self.contents[rows.slot][row % self.page_tokens] for row in range(rows.start, rows.end)]
        assert POISON not in tokens, f"rows [{rows.start}, {rows.end}) were never written"
        return tokens

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that lanes and pages use; others may be read by another thread just now."""
        return sum(slot.nbytes for slot in list(self.contents) if slot.pages or slot.holders)


class LaneState:
    """The state of one recurrent group on one lane: all its tokens."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tokens: list[int] = []
        self.is_reserved = False

    @property
    def nbytes(self) -> int:
        return self.full_bytes if self.is_reserved else 0

    @property
    def full_bytes(self) -> int:
        return self.group.state_bytes

    def reserve(self) -> None:
        self.is_reserved = True

    def reset(self) -> None:
        self.tokens = []

    def free(self) -> None:
        self.tokens, self.is_reserved = [], False


class PooledFakeLane(PooledLane[LaneState]):
    """A lane in slots of a `TokenArena`."""

    def __init__(self, engine: PooledFakeEngine) -> None:
        self.engine = engine
        self.arena = engine.arena
        row_groups = [group for group in engine.groups if group.kind is not Kind.RECURRENT]
        super().__init__(
            {group: PooledRows(group, engine.arena, SLACK, engine.page_tokens) for group in row_groups},
            {group: LaneState(group) for group in engine.groups if group.kind is Kind.RECURRENT},
        )

    @property
    def held(self) -> dict[Group, tuple[int, list[int]]]:
        """Each group's first row, and the tokens from there on."""
        return {group: self._held(group) for group in self.engine.groups}

    def _held(self, group: Group) -> tuple[int, list[int]]:
        if group.kind is Kind.RECURRENT:
            return 0, self._states[group].tokens
        rows = self._rows[group]
        pieces = rows.covering(rows.base, self._offset)
        assert [piece.start for piece in pieces] == [rows.base, *(piece.end for piece in pieces)][: len(pieces)]
        return rows.base, [token for piece in pieces for token in self.arena.read(piece)]

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        self.engine.maybe_fail("reserve")
        promised = self.bytes_for(num_tokens, incoming)
        super().reserve(num_tokens, incoming)
        assert self.nbytes == promised

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        self.engine.maybe_fail("adopt")
        assert set(sources) == set(self.engine.groups)
        for source in sources.values():
            for item in (*source.pages, *([source.state] if source.state else [])):
                assert item in self.engine.live and item.tier is not Tier.DISK, f"adopting what was released {item}"
        before = self.nbytes
        super().adopt(offset, sources)
        assert self.nbytes <= before, f"{self.nbytes} bytes after adopting, and {before} were reserved"

    def publish(self, group: Group, start: int, end: int) -> Page:
        self.engine.maybe_fail("publish")
        return super().publish(group, start, end)

    def capture(self, group: Group) -> State:
        self.engine.maybe_fail("capture")
        return super().capture(group)

    def feed(self, ids: Sequence[int], fail_after: int | None) -> None:
        before = self.nbytes
        self.begin_run(len(ids))
        assert self.nbytes <= before, f"a run takes {self.nbytes} bytes, and {before} were reserved"
        self._is_damaged = bool(self._states)
        for number, group in enumerate(self.engine.groups):
            if number == fail_after:
                raise EngineError(f"made to fail before group {number}")
            self._append(group, ids)
        if fail_after is not None:
            raise EngineError("made to fail after the last group")
        self.end_run(len(ids))
        self._is_damaged = False

    def _append(self, group: Group, ids: Sequence[int]) -> None:
        if group.kind is Kind.RECURRENT:
            self._states[group].tokens = [*self._states[group].tokens, *ids]
            return
        rows = self._rows[group]
        for piece in rows.covering(self._offset, self._offset + len(ids)):
            assert piece.slot.writer is rows, "a lane writes to a slot of which it is not the writer"
            self.arena.write(piece, ids[piece.start - self._offset : piece.end - self._offset])

    def _copy_rows_in(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        for piece in rows.covering(start, end):
            self.arena.write(piece, page.rows[piece.start - page.start : piece.end - page.start])

    def _make_page(self, group: Group, rows: SlotRows) -> Page:
        return self.engine.make_page(group, rows)

    def _copy_state_in(self, target: LaneState, state: State) -> None:
        target.tokens = list(self.engine.content(state))

    def _copy_state_out(self, group: Group, source: LaneState) -> State:
        return self.engine.make_state(group, self._offset, source.tokens)


class PooledFakeEngine(FakeEngine):
    """The fake engine with rows and states of the device in slots. The arena is as large as `arena_bytes`, or larger."""

    def __init__(
        self,
        groups: Sequence[Group] = MODELS["full"],
        *,
        page_tokens: int = 2,
        arena_bytes: int = 1 << 20,
        has_host: bool = False,
    ) -> None:
        super().__init__(groups, has_host=has_host)
        self.page_tokens = page_tokens
        self.max_chunk_tokens = SLACK
        sizes = {group: group.bytes_per_token * page_tokens or group.state_bytes for group in self.groups}
        rows = [size for group, size in sizes.items() if group.kind is not Kind.RECURRENT]
        chunk = chunk_size(rows, [size for group, size in sizes.items() if group.kind is Kind.RECURRENT])
        self.arena = TokenArena(dict(sizes), -(-arena_bytes // chunk), chunk, page_tokens)

    def make_lane(self) -> Lane:
        return PooledFakeLane(self)

    def make_page(self, group: Group, rows: SlotRows) -> Page:
        self.arena.add_page(rows.slot)
        page = Page(group, rows.start, rows.end, rows._replace(use=rows.slot.use), 0, block=rows.slot)
        self.track(page)
        self.content(page)  # which must be there
        return page

    def make_state(self, group: Group, offset: int, tokens: Sequence[int]) -> State:
        slot = self.arena.take(group)
        self.arena.add_page(slot)
        self.arena.contents[slot] = tuple(tokens)
        state = State(group, offset, StateSlot(slot, slot.use), slot.nbytes)
        self.live.add(state)
        return state

    def content(self, item: Page | State) -> Sequence[int]:
        held = item.rows if isinstance(item, Page) else item.data
        if isinstance(held, SlotRows):
            return self.arena.read(held)
        if isinstance(held, StateSlot):
            tokens: Sequence[int] = self.arena.contents[held.slot]
            return tokens
        return super().content(item)

    def device_bytes(self, item: Page | State) -> int:
        return self.arena.slot_bytes(item.group)

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        if not isinstance(page.rows, SlotRows):
            return super().cut(page, at)
        assert page.start < at < page.end
        self.maybe_fail("cut")
        left = self.make_page(page.group, page.rows._replace(end=at))
        right = self.make_page(page.group, page.rows._replace(start=at))
        self.release(page)
        return left, right

    def can_join(self, left: Page, right: Page) -> bool:
        return left.block is right.block

    def join(self, left: Page, right: Page) -> Page:
        if not isinstance(left.rows, SlotRows):
            return super().join(left, right)
        assert left.rows.slot is right.rows.slot and left.end == right.start, "pages in different slots are joined"
        self.maybe_fail("join")
        joined = self.make_page(left.group, left.rows._replace(end=right.end))
        self.release(left)
        self.release(right)
        return joined

    def release(self, item: Page | State) -> None:
        super().release(item)
        held = item.rows if isinstance(item, Page) else item.data
        if isinstance(held, SlotRows | StateSlot):
            self.arena.drop_page(held.slot)
        if isinstance(item, Page):
            item.rows = item.block = None
        else:
            item.data = None

    def pack(self, item: Page | State) -> bytes | None:
        """Other threads call this while the slot may be handed out again."""
        held = item.rows if isinstance(item, Page) else item.data
        if held is None:
            return None
        if not isinstance(held, SlotRows | StateSlot):
            return self.pack_tokens(item, held)
        if not self.arena.begin_read(held.slot, held.use):
            return None
        try:
            found = self.arena.read(held) if isinstance(held, SlotRows) else self.arena.contents[held.slot]
            return self.pack_tokens(item, found)
        finally:
            self.arena.end_read(held.slot)

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        page = super().unpack_page(group, start, end, data, tier)
        if tier is Tier.DEVICE:
            self.live.remove(page)
            slot = self.arena.take(group, start)
            rows = SlotRows(slot, start, end)
            self.arena.write(rows, page.rows)
            slot.mark = end
            return self.make_page(group, rows)
        return page

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        state = super().unpack_state(group, offset, data, tier)
        if tier is Tier.DEVICE:
            self.live.remove(state)
            return self.make_state(group, offset, state.data)
        return state

    def to_host(self, item: Page | State) -> None:
        super().to_host(item)
        tokens = tuple(self.content(item))
        held = item.rows if isinstance(item, Page) else item.data
        self.arena.drop_page(held.slot)
        if isinstance(item, Page):
            item.rows, item.block, item.nbytes = tokens, None, item.content_bytes
        else:
            item.data, item.nbytes = tokens, item.content_bytes
