"""The arena: all device memory for rows and states of a model, in slots, without any tensor.

A slot has room for 256 rows of one group, or for one state. Row r of a sequence lies at place r % 256 of its slot. Groups
have slots of different sizes, so memory is handed out in chunks, each with slots of one kind: for rows a whole number of
them, so that a slot's index tells where it lies. A chunk without any slot in use is free for every kind. So slots of a kind
may be missing though there are enough free bytes; what lanes were promised is kept for them, and nobody else takes it.

A slot is used by pages of the tree and by lanes, and free when neither holds it. Its bytes are carried by the tree as long
as a page lies in it, else by the first lane that holds it. What is written to a slot follows what is there: `mark` is the
first row that is not written yet, and only its writer writes on, or whoever stands at the mark if there is none. So nothing
that somebody may look at ever changes, and nothing is copied in order to be written on.

Always true between calls (`check` asserts it): each slot of a chunk that is in use is free or used; a holder's `carried` is
the number of slots that it carries.

One thread calls the arena; others may read what lies in a slot between `begin_read` and `end_read`. A slot that nobody else
uses is free when they have done so; who finds no other one waits for that. Who uses a slot changes under the lock only, so
that the last user gives it back, and no one else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bough.cache.tree.state import Block


class Holder(Protocol):
    """What holds slots on behalf of a lane. `carried` counts those whose bytes it carries."""

    carried: int


@dataclass(eq=False)
class Slot(Block):
    """Memory for the rows of one page, or for a state. `kind` and `index` tell where it lies.

    `after` are the engine's marks of what the device must have done before the slot is used again. `use` counts how
    often it was handed out, so that a reader knows whether what it looked for is still there.
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
        """The lane that carries its bytes; None if the tree does, or nobody uses it."""
        return self.holders[0] if self.holders and not self.pages else None


class ArenaFull(MemoryError):
    """There is no free slot."""


@dataclass(eq=False)
class _Chunk:
    """A piece of the arena that is divided into slots of one kind; those that are not used are in `free`."""

    number: int
    slots: list[Slot]
    free: list[Slot]


class Arena:
    """Slots of several kinds in one piece of memory of `num_chunks` times `chunk_bytes`."""

    def __init__(self, slot_bytes: Mapping[Hashable, int], num_chunks: int, chunk_bytes: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.used_bytes = 0
        self._slot_bytes = dict(slot_bytes)
        self._free_chunks = {
            number: tuple[Any, ...]() for number in range(num_chunks - 1, -1, -1)
        }  # and what they wait for
        self._chunks: dict[Hashable, dict[int, _Chunk]] = {kind: {} for kind in slot_bytes}
        self._open: dict[Hashable, dict[int, _Chunk]] = {kind: {} for kind in slot_bytes}  # those with a free slot
        self.on_take: Callable[[Slot], None] = lambda slot: None  # before a slot is used again
        self._num_free: dict[Hashable, int] = dict.fromkeys(slot_bytes, 0)  # slots, in those
        self._promised: dict[Hashable, int] = dict.fromkeys(slot_bytes, 0)  # slots
        self._num_read_only = 0  # slots that only other threads use
        self._lock = threading.Condition(threading.Lock())

    def slots_of_chunk(self, kind: Hashable) -> int:
        return self.chunk_bytes // self._slot_bytes[kind]

    def num_slots(self, kind: Hashable) -> int:
        """How many slots of a kind there could be, if nothing else was there."""
        return self.num_chunks * self.slots_of_chunk(kind)

    def slot_bytes(self, kind: Hashable) -> int:
        return self._slot_bytes[kind]

    def start_byte(self, slot: Slot) -> int:
        """Where a slot begins in the arena's memory."""
        chunk, place = divmod(slot.index, self.slots_of_chunk(slot.kind))
        return chunk * self.chunk_bytes + place * slot.nbytes

    def can_promise(self, kind: Hashable, num: int) -> bool:
        """Whether so many slots of a kind could be promised beside all that is promised already."""
        with self._lock:
            return self._fits(kind, num)

    def promise(self, kind: Hashable, num: int) -> None:
        """Keep so many more slots of a kind, or fewer, for those who will take them."""
        self._promised[kind] += num
        assert self._promised[kind] >= 0, "more was taken than was promised"

    def take(self, kind: Hashable, start: int = 0, *, is_promised: bool = False) -> Slot:
        """A free slot in which row `start` comes first. The caller must hold it, or put a page into it, at once.

        Raises ArenaFull if there is none, or, if it was not promised, none that others do not need.
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

    def hold(self, slot: Slot, holder: Holder) -> None:
        """A lane holds a slot: once for each piece of rows that it has there, and its bytes count once."""
        with self._lock:
            before = slot.carrier
            slot.holders.append(holder)
            _move_bytes(before, slot.carrier)

    def drop(self, slot: Slot, holder: Holder) -> None:
        """A lane holds a slot no longer."""
        with self._lock:
            before = slot.carrier
            slot.holders.remove(holder)
            if slot.writer is holder:
                slot.writer = None
            _move_bytes(before, slot.carrier)
            self._free_if_unused(slot)

    def add_page(self, slot: Slot) -> None:
        """One more page, or a state, of the tree lies in a slot."""
        with self._lock:
            before = slot.carrier
            slot.pages += 1
            _move_bytes(before, slot.carrier)

    def drop_page(self, slot: Slot) -> None:
        """A page, or a state, of the tree lies in the slot no longer."""
        assert slot.pages > 0, f"slot {slot.index} has no page to drop"
        with self._lock:
            before = slot.carrier
            slot.pages -= 1
            _move_bytes(before, slot.carrier)
            self._free_if_unused(slot)

    def begin_read(self, slot: Slot, use: int) -> bool:
        """Keep a slot from being handed out while another thread reads it; False if that has happened already."""
        with self._lock:
            is_there = slot.use == use and slot.is_used
            slot.readers += is_there
            return is_there

    def end_read(self, slot: Slot) -> None:
        """The other thread has done with the slot."""
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

    def _divide_chunk(self, kind: Hashable) -> _Chunk:
        """Divide a free chunk into slots of a kind."""
        nbytes, size = self._slot_bytes[kind], self.slots_of_chunk(kind)
        number, after = self._free_chunks.popitem()
        slots = [Slot(nbytes, kind, index, after=after) for index in range(number * size, (number + 1) * size)]
        chunk = _Chunk(number, slots, slots[::-1])
        self._chunks[kind][number] = self._open[kind][number] = chunk
        self._num_free[kind] += size
        return chunk

    def _fits(self, kind: Hashable, num: int) -> bool:
        """Whether so many slots of a kind are there beside all that are promised."""
        num_chunks = 0
        for each, promised in self._promised.items():
            missing = promised + (num if each == kind else 0) - self._num_free[each]
            num_chunks += -(-missing // self.slots_of_chunk(each)) if missing > 0 else 0
        return num_chunks <= len(self._free_chunks)

    def _full(self, kind: Hashable) -> ArenaFull:
        total, promised = (
            self.num_chunks * self.chunk_bytes,
            sum(n * self._slot_bytes[k] for k, n in self._promised.items()),
        )
        return ArenaFull(
            f"no slot of {self._slot_bytes[kind]:,} bytes is free: {self.used_bytes:,} of {total:,} bytes are used, "
            f"{promised:,} are promised"
        )

    def _free_if_unused(self, slot: Slot) -> None:
        if not slot.is_used:
            self._give_back(slot)
        elif not slot.pages and not slot.holders:
            self._num_read_only += 1

    def _give_back(self, slot: Slot) -> None:
        """A slot that nobody uses is free; so is its chunk, if that was the last one in use there."""
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


def _move_bytes(before: Holder | None, after: Holder | None) -> None:
    if before is not after:
        if before is not None:
            before.carried -= 1
        if after is not None:
            after.carried += 1


def chunk_size(row_slot_bytes: list[int], state_bytes: list[int]) -> int:
    """The smallest chunk that holds a whole number of slots of each row group, and at least one state of each kind."""
    size = math.lcm(*row_slot_bytes) if row_slot_bytes else max(state_bytes, default=1)
    return size * max(1, -(-max(state_bytes, default=0) // size))
