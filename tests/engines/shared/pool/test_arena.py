"""The arena: slots are used or free, counted once for whoever carries them, and kept for those they were promised to."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest

from bough.engines.shared.pool.arena import Arena, ArenaFull, ArenaSlot, chunk_size

SIZES = {"rows": 6, "window": 4, "state": 5}
CHUNK = chunk_size([6, 4], [5])


class Lane:
    """Holds slots."""

    def __init__(self) -> None:
        self.carried = 0
        self.slots: list[ArenaSlot] = []


def make_arena(num_chunks: int = 4) -> Arena:
    return Arena(SIZES, num_chunks, CHUNK)


def take_page(arena: Arena, kind: str = "rows") -> ArenaSlot:
    slot = arena.take(kind)
    arena.add_page(slot)
    return slot


def test_a_chunk_holds_whole_slots_of_each_row_group_and_a_state() -> None:
    assert chunk_size([6, 4], [5]) == 12
    assert chunk_size([6, 4], [30]) == 36
    assert chunk_size([], [30, 7]) == 30


def test_slots_lie_apart_whatever_their_kind() -> None:
    arena = make_arena()
    taken = [take_page(arena, kind) for kind in ("rows", "window", "state", "rows", "window", "rows")]
    spans = sorted((arena.start_byte(slot), arena.start_byte(slot) + slot.nbytes) for slot in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= arena.num_chunks * arena.chunk_bytes


def test_the_tree_carries_a_slot_before_any_lane_and_the_next_lane_after_the_first() -> None:
    arena, first, second = make_arena(), Lane(), Lane()
    slot = arena.take("rows")
    arena.hold(slot, first)
    arena.hold(slot, second)
    assert (first.carried, second.carried) == (1, 0)
    arena.add_page(slot)
    assert (first.carried, second.carried) == (0, 0)
    arena.drop_page(slot)
    arena.drop(slot, first)
    assert (first.carried, second.carried) == (0, 1)
    arena.drop(slot, second)
    assert second.carried == arena.used_bytes == 0


def test_a_full_arena_says_so_with_the_numbers() -> None:
    arena = make_arena(1)
    take_page(arena)
    take_page(arena)
    with pytest.raises(ArenaFull, match="no slot of 6 bytes is free: 12 of 12 bytes are used"):
        arena.take("rows")
    with pytest.raises(ArenaFull):
        arena.take("window")


def test_what_was_promised_is_kept_from_all_others() -> None:
    arena = make_arena(2)
    assert arena.can_promise("rows", 4) and not arena.can_promise("rows", 5)
    arena.promise("rows", 3)
    assert not arena.can_promise("window", 1)  # no chunk is left for another kind
    take_page(arena)
    with pytest.raises(ArenaFull):
        arena.take("rows")
    for _ in range(3):
        arena.add_page(arena.take("rows", is_promised=True))
    arena.check()
    assert arena.used_bytes == 24


def test_scattered_slots_leave_no_room_for_another_kind() -> None:
    arena = make_arena(2)
    slots = [take_page(arena) for _ in range(4)]
    arena.drop_page(slots[0])
    arena.drop_page(slots[2])
    assert arena.used_bytes == 12 and not arena.can_promise("window", 1) and arena.can_promise("rows", 2)
    arena.drop_page(slots[1])
    assert arena.can_promise("window", 3)


def test_a_slot_that_is_read_is_handed_out_again_when_that_is_done() -> None:
    arena = make_arena(1)
    slot, other = take_page(arena), take_page(arena)
    assert arena.begin_read(slot, slot.use)
    arena.drop_page(slot)
    assert not arena.begin_read(slot, slot.use - 1)
    reader = threading.Thread(target=arena.end_read, args=[slot])
    waits = arena._lock.wait
    arena._lock.wait = lambda: (reader.start(), waits())[1]  # type: ignore[method-assign]  # the reader ends meanwhile

    again = take_page(arena)  # waits

    reader.join()
    assert again is slot and not arena.begin_read(slot, slot.use - 1)
    arena.drop_page(again)
    arena.drop_page(other)
    arena.check()
    assert arena.used_bytes == 0


def test_dropping_a_page_twice_is_found() -> None:
    arena = make_arena()
    slot = take_page(arena)
    arena.drop_page(slot)
    with pytest.raises(AssertionError):
        arena.drop_page(slot)


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_uses_keeps_the_count(seed: int) -> None:
    chance, arena = random.Random(seed), make_arena(6)
    lanes, pages = [Lane() for _ in range(3)], list[ArenaSlot]()

    def take() -> None:
        kind, lane = chance.choice(list(SIZES)), chance.choice(lanes)
        try:
            slot = arena.take(kind)
        except ArenaFull:
            assert not arena.can_promise(kind, 1)
            return
        arena.hold(slot, lane)
        lane.slots.append(slot)

    def publish() -> None:
        if held := [slot for lane in lanes for slot in lane.slots]:
            pages.append(chance.choice(held))
            arena.add_page(pages[-1])

    def refer() -> None:
        if pages:
            lane = chance.choice(lanes)
            lane.slots.append(chance.choice(pages))
            arena.hold(lane.slots[-1], lane)

    def drop() -> None:
        lane = chance.choice(lanes)
        if lane.slots:
            arena.drop(lane.slots.pop(chance.randrange(len(lane.slots))), lane)

    def evict() -> None:
        if pages:
            arena.drop_page(pages.pop(chance.randrange(len(pages))))

    for _ in range(400):
        chance.choice([take, take, publish, refer, drop, evict])()
        arena.check()
        used = {slot for lane in lanes for slot in lane.slots} | set(pages)
        assert arena.used_bytes == sum(slot.nbytes for slot in used)
        assert sum(lane.carried for lane in lanes) == len(used - set(pages))
    for lane in lanes:
        while lane.slots:
            arena.drop(lane.slots.pop(), lane)
    while pages:
        arena.drop_page(pages.pop())
    arena.check()
    assert arena.used_bytes == 0
