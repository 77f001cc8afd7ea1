"""A slot that its last user gives up while another thread ends reading it."""

from __future__ import annotations

import threading

from bough.engines.shared.pool.arena import Arena, ArenaSlot
from tests.waiting import WatchedLock, wait_until


class _Holder:
    """A lane. Another thread ends its reading just when the lane stops carrying the slot."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = WatchedLock()
        arena._lock = threading.Condition(self._lock)  # type: ignore[arg-type]
        self._carried = 0
        self.read: ArenaSlot | None = None
        self.reader: threading.Thread | None = None

    @property
    def carried(self) -> int:
        return self._carried

    @carried.setter
    def carried(self, number: int) -> None:
        self._carried = number
        if self.read is not None and self.reader is None:
            self.reader = threading.Thread(target=self._arena.end_read, args=(self.read,))
            self.reader.start()
            reader = self.reader
            wait_until(lambda: self._lock.is_awaited.is_set() or not reader.is_alive())  # it may have to wait for this one


def test_a_slot_is_given_back_once_when_lane_and_reader_leave_together() -> None:
    arena = Arena({"rows": 8}, num_chunks=1, chunk_bytes=32)
    holder = _Holder(arena)
    other, slot = arena.take("rows"), arena.take("rows")
    arena.hold(other, holder)
    arena.hold(slot, holder)
    assert arena.begin_read(slot, slot.use)
    holder.read = slot
    arena.drop(slot, holder)
    assert holder.reader is not None
    holder.reader.join()
    taken = [arena.take("rows") for _ in range(3)]
    assert len({each.index for each in (other, *taken)}) == 4, "a slot was handed out twice"
    assert arena.used_bytes == 32
