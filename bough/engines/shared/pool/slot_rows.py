"""The rows of one group on one lane: the slots that they are in, and how many more slots are promised to the lane.

`pieces` follow each other from row `base` on. The last one may extend beyond the rows that are written, up to its page
border: that is room for more. Slots are taken when a run needs them; until then the arena keeps as many as were reserved.

Full attention takes each slot once, so a promise ends when its slot is taken. A window needs a fixed number of slots: one
that falls behind the window is dropped and promised again. A slot with a page of the tree is not free then, and the lane
needs another one; so a slot that a window publishes is promised again at once, and `nbytes` does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from bough.cache.tree.state import PAGE_TOKENS, Group, Incoming, Kind, Range
from bough.engines.shared.pool.arena import Arena, ArenaFull, ArenaSlot
from bough.engines.shared.pool.plan import Piece


class SlotRows(NamedTuple):
    """Rows [start, end) of a sequence, in a slot; of a page, or of a lane.

    In a page, `use` is that of the slot when the page was made; other threads pass it to `Arena.begin_read`.
    """

    slot: ArenaSlot
    start: int
    end: int
    use: int = 0


class PooledRows:
    """The rows of one group on one lane. `slack` is the longest run of a chunked prompt."""

    def __init__(self, group: Group, arena: Arena, slack: int, page_tokens: int = PAGE_TOKENS) -> None:
        self.group = group
        self.carried = 0
        self.base = 0
        self.pieces: list[SlotRows] = []
        self.version = 0  # grows when pieces change, not when rows are written
        self._arena = arena
        self._slot_bytes = arena.slot_bytes(group)
        self._slack = slack
        self._page_tokens = page_tokens
        self._is_window = group.kind is Kind.WINDOW
        self._reserved = 0  # rows
        self._allowed = 0  # slots that may be taken; for a window, slots that may be its own at a time
        self._own: set[ArenaSlot] = set()  # for a window: slots that it took, still holds, and that have no page
        self._kept = 0  # slots that the arena keeps for this lane

    @property
    def nbytes(self) -> int:
        return (self.carried + self._promised) * self._slot_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of the slots that may still be taken."""
        return self._promised * self._slot_bytes

    @property
    def room_end(self) -> int:
        """The end of the rows that have a slot."""
        return self.pieces[-1].end if self.pieces else self.base

    def blocks(self) -> Iterator[ArenaSlot]:
        return (piece.slot for piece in self.pieces)

    def plan_pieces(self) -> list[Piece]:
        """The pieces as a plan takes them."""
        return [(piece.slot.index, piece.start, piece.end) for piece in self.pieces]

    def bytes_for(self, num_tokens: int, offset: int, incoming: Incoming | None) -> int:
        """`nbytes` after rows [0, num_tokens) were reserved."""
        allowed = max(self._allowed, self._needed(num_tokens, offset, incoming))
        return (self.carried + self._promised_of(allowed)) * self._slot_bytes

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None) -> int:
        """`nbytes` after rows [0, num_tokens) were reserved for a lane without any."""
        incoming = incoming or Incoming(0)
        if self._is_window:
            return (self._window_slots(num_tokens) + self._copied_excess(incoming)) * self._slot_bytes
        return self._full_slots(num_tokens, incoming) * self._slot_bytes

    def reserve(self, num_tokens: int, offset: int, incoming: Incoming | None) -> None:
        """Promise slots for rows [0, num_tokens): those that are copied in, and those after the offset.

        Raise ArenaFull if the arena cannot keep that many.
        """
        allowed = max(self._allowed, self._needed(num_tokens, offset, incoming))
        more = self._promised_of(allowed) - self._kept
        if more > 0 and not self._arena.can_promise(self.group, more):
            raise ArenaFull(f"{more} more slots of {self._slot_bytes:,} bytes cannot be promised")
        self._allowed = allowed
        self._reserved = num_tokens if incoming else max(self._reserved, num_tokens)
        self._update_promise()

    def continue_at(self, offset: int) -> None:
        """Continue from `offset` after adopting: in the last slot, if no other lane writes there; promise the rest."""
        self._continue_last(offset)
        self._allowed = self._needed(self._reserved, offset, None) if self._reserved else 0
        self._update_promise()

    def drop_reserve(self) -> None:
        self._reserved = self._allowed = 0
        self._update_promise()

    def has_room_for(self, offset: int, num_tokens: int) -> bool:
        """Whether a run of that many tokens fits into pieces and promises."""
        end = offset + num_tokens
        return end <= self.room_end or self._is_window or self._slots_between(self.room_end, end) <= self._promised

    def make_room(self, offset: int, num_tokens: int) -> None:
        """Take slots for the rows of a run. A window drops those that a lane at `offset` no longer needs."""
        if self._is_window:
            self._drop_below(self.group.first_needed(offset))
        end = offset + num_tokens
        if end <= self.room_end:
            return
        self._continue_last(self.room_end)
        while self.room_end < end:
            self._take_slot()

    def mark_written(self, offset: int, num_tokens: int) -> None:
        for piece in self.covering(offset, offset + num_tokens):
            piece.slot.mark = max(piece.slot.mark, piece.end)

    def covering(self, start: int, end: int) -> list[SlotRows]:
        """Rows [start, end) by slot. Costs O(pieces from `start` on)."""
        found = []
        for piece in reversed(self.pieces):
            if piece.end <= start:
                break
            if piece.start < end:
                found.append(SlotRows(piece.slot, max(piece.start, start), min(piece.end, end)))
        return found[::-1]

    def mark_published(self, slot: ArenaSlot) -> None:
        self._own.discard(slot)
        self._update_promise()

    def append(self, rows: SlotRows) -> None:
        """Append rows of a page on the device, by reference; rows from their start on are dropped before."""
        self.cut(rows.start)
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.slot is rows.slot:
            self.pieces[-1] = SlotRows(last.slot, last.start, rows.end)
        else:
            self._arena.hold(rows.slot, self)
            self.pieces.append(SlotRows(*rows[:3]))
        self.version += 1

    def cut(self, offset: int) -> None:
        """Drop the rows from `offset` on, and the room after them."""
        while self.pieces and self.pieces[-1].start >= offset:
            self._drop(self.pieces.pop())
        if self.pieces and self.pieces[-1].end > offset:
            slot, start = self.pieces[-1][:2]
            self.pieces[-1] = SlotRows(slot, start, offset)
            if slot.writer is self:
                slot.writer = None
            self.version += 1

    def start_at(self, base: int) -> None:
        """Drop all rows; the next ones begin at `base`."""
        self.cut(0)
        self.base = base

    def free(self) -> None:
        self.start_at(0)
        self.drop_reserve()

    def _update_promise(self) -> None:
        """Make the arena keep the slots that this lane may still take."""
        self._arena.promise(self.group, self._promised - self._kept)
        self._kept = self._promised

    @property
    def _promised(self) -> int:
        return self._promised_of(self._allowed)

    def _promised_of(self, allowed: int) -> int:
        return max(0, allowed - len(self._own)) if self._is_window else allowed

    def _needed(self, num_tokens: int, offset: int, incoming: Incoming | None) -> int:
        """Slots that must be allowed for rows [0, num_tokens)."""
        if self._is_window:
            copied = self._copied_excess(incoming) if incoming else 0
            return self._window_slots(num_tokens) + max(self._num_excess(), copied)
        if incoming is None:
            return self._slots_between(max(offset, self.room_end), num_tokens)
        return self._full_slots(num_tokens, incoming)

    def _full_slots(self, num_tokens: int, incoming: Incoming) -> int:
        """Slots for the rows that are copied in, and for those from the offset on, which may continue the last of these."""
        copied = incoming.copied.get(self.group, ())
        num, room_end = self._copied_slots(copied)
        start = room_end if copied and copied[-1][1] == incoming.offset else incoming.offset
        return num + self._slots_between(start, num_tokens)

    def _copied_slots(self, copied: Sequence[Range]) -> tuple[int, int]:
        """The number of slots for these rows, and the end of the last one's room. After each gap comes a new slot."""
        num = room_end = last = 0
        for start, end in copied:
            room_end = room_end if start == last else start
            num += self._slots_between(room_end, end)
            room_end, last = max(room_end, self._border_after(end - 1)), end
        return num, room_end

    def _copied_excess(self, incoming: Incoming) -> int:
        """How many slots the rows that are copied in need beyond one for each page."""
        copied = incoming.copied.get(self.group, ())
        pages = {page for start, end in copied for page in range(start // self._page_tokens, -(-end // self._page_tokens))}
        return self._copied_slots(copied)[0] - len(pages)

    def _num_excess(self) -> int:
        """How many own slots this window has beyond one for each page."""
        own = [piece for piece in self.pieces if piece.slot in self._own] if self._own else []
        return len(own) - len({piece.start // self._page_tokens for piece in own})

    def _window_slots(self, num_tokens: int) -> int:
        """The most slots of a window: its rows and those of a run may begin and end inside a page, and the first run may
        begin inside a page whose slot it cannot continue.
        """
        rows = min(num_tokens, self.group.window + self._slack)
        return -(-rows // self._page_tokens) + 2

    def _continue_last(self, offset: int) -> None:
        """Extend the last piece to its page border, if its slot is written up to `offset` and has no other writer."""
        last = self.pieces[-1] if self.pieces else None
        if last is None or last.end != offset or offset % self._page_tokens == 0:
            return
        if last.slot.mark == offset and last.slot.writer in (None, self):
            last.slot.writer = self
            self.pieces[-1] = SlotRows(last.slot, last.start, self._border_after(offset))
            self.version += 1

    def _take_slot(self) -> None:
        start = self.room_end
        assert self._promised or self._is_window, f"no room at {start}: {self._reserved} rows were reserved"
        slot = self._arena.take(self.group, start, is_promised=self._kept > 0)
        self._kept -= self._kept > 0
        self._arena.hold(slot, self)
        slot.writer = self
        if self._is_window:
            self._own.add(slot)
        else:
            self._allowed -= 1
        self.pieces.append(SlotRows(slot, start, self._border_after(start)))
        self.version += 1

    def _drop(self, piece: SlotRows) -> None:
        """Release the slot of a piece that was removed from the list."""
        self._arena.drop(piece.slot, self)
        self._own.discard(piece.slot)
        self._update_promise()
        self.version += 1

    def _drop_below(self, first: int) -> None:
        """Drop the pieces with no row from `first` on."""
        num = sum(1 for _ in takewhile(lambda piece: piece.end <= first, self.pieces))
        if num:
            dropped, self.pieces = self.pieces[:num], self.pieces[num:]
            for piece in dropped:
                self._drop(piece)
            self.base = max(self.base, self.pieces[0].start if self.pieces else first)

    def _border_after(self, row: int) -> int:
        return (row // self._page_tokens + 1) * self._page_tokens

    def _slots_between(self, start: int, end: int) -> int:
        return -(-end // self._page_tokens) - start // self._page_tokens if start < end else 0
