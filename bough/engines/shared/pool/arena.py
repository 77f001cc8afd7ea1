"""The arena: all device memory for rows and states of a model, in slots, without any tensor.

A slot has room for 256 rows of one group, or for one state. Row r of a sequence is at place r % 256 of its slot. Groups
have slots of different sizes, so memory is divided in chunks, each with slots of one kind: a whole number of them if they
are for rows, so that a slot's index determines its address. A chunk without any used slot is free for every kind. So slots
of a kind may be missing though there are enough free bytes; slots that were promised to lanes are kept for them.

Pages of the tree and lanes use slots. The tree carries the bytes of a slot that has a page, otherwise the first lane that
holds it. Rows are written in order: `mark` is the first row of a slot that is not written yet. Only the slot's writer
writes, or a lane that ends at the mark, if there is no writer. So rows that a lane or a page refers to never change, and
nothing is copied in order to write after it.

Always true between calls (`check` asserts it): each slot of a chunk that is in use is free or used; a holder's `carried` is
the number of slots that it carries.

One thread calls the arena. Other threads may read a slot between `begin_read` and `end_read`; a slot that only they use is
free afterwards, and `take` waits for that if there is no other. Users of a slot change under the lock only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from bough.cache.tree.state import Block


class Holder(Protocol):
    """Holds slots on behalf of a lane. `carried` counts those whose bytes it carries."""

    carried: int


@dataclass(eq=False)
class ArenaSlot(Block):
    """Memory for the rows of one page, or for a state. `kind` and `index` determine its address.

    `after` are the engine's events after which the device may reuse the slot. `use` counts how often it was taken, so that
    a reader notices whether its content is still there.
    """

    kind: Hashable = None
    index: int = 0
    mark: int = 0
    writer: Holder | None = None
    after: tuple[Any, ...] = ()
    pages: int = 0
    holders: list[Holder] = field(default_factory=list)
    readers: int = 0
    use: int = 0

    @property
    def is_used(self) -> bool:
        return bool(self.pages or self.holders or self.readers)

    @property
    def carrier(self) -> Holder | None:
        """The lane that carries its bytes; None if the tree does, or if it is not used."""
        return self.holders[0] if self.holders and not self.pages else None


class ArenaFull(MemoryError):
    """There is no free slot."""


@dataclass(eq=False)
class _Chunk:
    """A piece of the arena that is divided into slots of one kind; `free` are those that are not used."""

    number: int
    slots: list[ArenaSlot]
    free: list[ArenaSlot]


class Arena:
    """Slots of several kinds in one piece of memory of `num_chunks` times `chunk_bytes`."""

    def __init__(self, slot_bytes: Mapping[Hashable, int], num_chunks: int, chunk_bytes: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.used_bytes = 0
        self.on_take: Callable[[ArenaSlot], None] = lambda slot: None  # called before a slot with events is used again
        self._slot_bytes = dict(slot_bytes)
        self._free_chunks: dict[int, tuple[Any, ...]] = dict.fromkeys(range(num_chunks - 1, -1, -1), ())  # with events
        self._chunks: dict[Hashable, dict[int, _Chunk]] = {kind: {} for kind in slot_bytes}
        self._open: dict[Hashable, dict[int, _Chunk]] = {kind: {} for kind in slot_bytes}  # those with a free slot
        self._num_free: dict[Hashable, int] = dict.fromkeys(slot_bytes, 0)  # slots, in those
        self._promised: dict[Hashable, int] = dict.fromkeys(slot_bytes, 0)  # slots
        self._num_read_only = 0  # slots that only other threads use
        self._lock = threading.Condition(threading.Lock())

    def slots_of_chunk(self, kind: Hashable) -> int:
        return self.chunk_bytes // self._slot_bytes[kind]

    def num_slots(self, kind: Hashable) -> int:
        """How many slots of a kind fit into an empty arena."""
        return self.num_chunks * self.slots_of_chunk(kind)

    def slot_bytes(self, kind: Hashable) -> int:
        return self._slot_bytes[kind]

    def start_byte(self, slot: ArenaSlot) -> int:
        chunk, place = divmod(slot.index, self.slots_of_chunk(slot.kind))
        return chunk * self.chunk_bytes + place * slot.nbytes

    def can_promise(self, kind: Hashable, num: int) -> bool:
        with self._lock:
            return self._fits(kind, num)

    def promise(self, kind: Hashable, num: int) -> None:
        """Keep `num` more slots of a kind for later; fewer if it is negative."""
        self._promised[kind] += num
        assert self._promised[kind] >= 0, "more was taken than was promised"

    def take(self, kind: Hashable, start: int = 0, *, is_promised: bool = False) -> ArenaSlot:
        """A free slot whose first row will be `start`. The caller must hold it, or add a page to it, at once.

        Raise ArenaFull if none is free, or if all free ones were promised and this one was not.
        """
        with self._lock:
            self._promised[kind] -= is_promised
            while not (self._open[kind] or self._free_chunks) or not (is_promised or self._fits(kind, 1)):
                if not self._num_read_only:
                    self._promised[kind] += is_promised
                    raise self._full(kind)
                self._lock.wait()
            chunk = next(reversed(self._open[kind].values()), None) or self._divide_chunk(kind)
            slot = chunk.free.pop()
            self._num_free[kind] -= 1
            if not chunk.free:
                del self._open[kind][chunk.number]
            slot.mark, slot.writer, slot.use = start, None, slot.use + 1
            self.used_bytes += slot.nbytes
        if slot.after:
            self.on_take(slot)
            slot.after = ()
        return slot

    def hold(self, slot: ArenaSlot, holder: Holder) -> None:
        """Add a holder, once for each piece of rows that its lane has in the slot; the bytes count once."""
        with self._changing_users(slot):
            slot.holders.append(holder)

    def drop(self, slot: ArenaSlot, holder: Holder) -> None:
        """Undo one `hold`."""
        with self._changing_users(slot):
            slot.holders.remove(holder)
            if slot.writer is holder:
                slot.writer = None

    def add_page(self, slot: ArenaSlot) -> None:
        """Count one more page, or a state, of the tree in a slot."""
        with self._changing_users(slot):
            slot.pages += 1

    def drop_page(self, slot: ArenaSlot) -> None:
        """Undo one `add_page`."""
        assert slot.pages > 0, f"slot {slot.index} has no page to drop"
        with self._changing_users(slot):
            slot.pages -= 1

    def begin_read(self, slot: ArenaSlot, use: int) -> bool:
        """Keep a slot from being reused while another thread reads it; returns False if it was reused already."""
        with self._lock:
            is_there = slot.use == use and slot.is_used
            slot.readers += is_there
            return is_there

    def end_read(self, slot: ArenaSlot) -> None:
        """Undo `begin_read`."""
        with self._lock:
            slot.readers -= 1
            if not slot.is_used:
                self._num_read_only -= 1
                self._give_back(slot)
                self._lock.notify_all()

    def check(self) -> None:
        """Assert what the module's docstring says."""
        carried: dict[Holder, int] = {}
        chunks = [chunk for chunks in self._chunks.values() for chunk in chunks.values()]
        for chunk in chunks:
            for slot in chunk.slots:
                assert slot.is_used != (slot in chunk.free), f"slot {slot.index} is free and used, or neither"
                for holder in set(slot.holders):
                    carried[holder] = carried.get(holder, 0) + (slot.carrier is holder)
        assert all(holder.carried == number for holder, number in carried.items())
        assert self.used_bytes == sum(slot.nbytes for chunk in chunks for slot in chunk.slots if slot.is_used)
        assert len(chunks) + len(self._free_chunks) == self.num_chunks
        for kind, own in self._chunks.items():
            assert self._num_free[kind] == sum(len(chunk.free) for chunk in own.values())

    @contextmanager
    def _changing_users(self, slot: ArenaSlot) -> Iterator[None]:
        """Under the lock: afterwards move the slot's bytes to their new carrier, and free the slot if it is not used."""
        with self._lock:
            before = slot.carrier
            yield
            after = slot.carrier
            if before is not after:
                if before is not None:
                    before.carried -= 1
                if after is not None:
                    after.carried += 1
            if not slot.is_used:
                self._give_back(slot)
            elif not slot.pages and not slot.holders:
                self._num_read_only += 1

    def _divide_chunk(self, kind: Hashable) -> _Chunk:
        nbytes, size = self._slot_bytes[kind], self.slots_of_chunk(kind)
        number, after = self._free_chunks.popitem()
        slots = [ArenaSlot(nbytes, kind, index, after=after) for index in range(number * size, (number + 1) * size)]
        chunk = _Chunk(number, slots, slots[::-1])
        self._chunks[kind][number] = self._open[kind][number] = chunk
        self._num_free[kind] += size
        return chunk

    def _fits(self, kind: Hashable, num: int) -> bool:
        """Whether that many slots of a kind are free beside all that are promised."""
        num_chunks = 0
        for each, promised in self._promised.items():
            missing = promised + (num if each == kind else 0) - self._num_free[each]
            num_chunks += -(-missing // self.slots_of_chunk(each)) if missing > 0 else 0
        return num_chunks <= len(self._free_chunks)

    def _full(self, kind: Hashable) -> ArenaFull:
        promised = sum(num * self._slot_bytes[each] for each, num in self._promised.items())
        return ArenaFull(
            f"no slot of {self._slot_bytes[kind]:,} bytes is free: {self.used_bytes:,} of "
            f"{self.num_chunks * self.chunk_bytes:,} bytes are used, {promised:,} are promised"
        )

    def _give_back(self, slot: ArenaSlot) -> None:
        """Free a slot that is not used any more, and its chunk, if no slot of that is used."""
        number = slot.index // self.slots_of_chunk(slot.kind)
        chunk = self._chunks[slot.kind][number]
        chunk.free.append(slot)
        self._num_free[slot.kind] += 1
        self.used_bytes -= slot.nbytes
        self._open[slot.kind][number] = chunk
        if len(chunk.free) == len(chunk.slots):
            del self._chunks[slot.kind][number], self._open[slot.kind][number]
            self._num_free[slot.kind] -= len(chunk.slots)
            self._free_chunks[number] = tuple(mark for each in chunk.slots for mark in each.after)


def chunk_size(row_slot_bytes: list[int], state_bytes: list[int]) -> int:
    """The smallest chunk with a whole number of slots of each row group, and at least one state of each kind."""
    size = math.lcm(*row_slot_bytes) if row_slot_bytes else max(state_bytes, default=1)
    return size * max(1, -(-max(state_bytes, default=0) // size))
