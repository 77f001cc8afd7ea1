"""Every lane sees each of its rows once, in the slot in which it lies, and plans are cut as measured best."""

from __future__ import annotations

import random
from array import array

import pytest

from bough.engines.shared.pool.plan import (
    CAUSAL,
    FIELDS,
    GROWING,
    PAGE,
    WHOLE,
    Piece,
    Plan,
    PlanShape,
    PlanTooLarge,
    find_places,
    make_plan,
    make_run_plan,
)
from tests.engines.shared.pool.random_lanes import RandomLanes, cut_before

HOPPER = 264  # programs of an H200


def shape(lanes_of_item: int, max_parts: int = 160, max_items: int = 4096) -> PlanShape:
    return PlanShape(8, lanes_of_item, max_parts, max_items, HOPPER)


def lanes_on(num: int, prefix: int, *, are_distinct: bool = False) -> list[list[Piece]]:
    """Lanes at row `prefix`, on one prefix or each on its own, with one piece to grow in."""
    pages = range(prefix // PAGE)
    return [
        [
            *((number * 1000 * are_distinct + at, at * PAGE, (at + 1) * PAGE) for at in pages),
            (9000 + number, prefix, prefix + PAGE),
        ]
        for number in range(num)
    ]


def rows_seen(plan: Plan) -> dict[tuple[int, int], tuple[int, int, int]]:
    """For each lane and row: the slot in which it is read, the part, and the kind of the item."""
    seen = {}
    for num, first, start, end, part, kind, *slots in plan.items:
        assert start < end
        assert (end - 1) // PAGE - start // PAGE < 8  # an item has so many slots
        for lane in plan.order[first : first + num] if num > 1 else [first]:
            for row in range(start, end):
                assert (lane, row) not in seen
                seen[lane, row] = (slots[row // PAGE - start // PAGE], part, kind)
    return seen


def random_plans(are_windows: bool) -> list[tuple[list[list[Piece]], list[int], Plan]]:
    rng = random.Random(1)
    made = []
    for _ in range(60):
        tree = RandomLanes(rng, PAGE)
        for _ in range(rng.randrange(6)):
            tree.add_trunk(1200)
        lanes, offsets = tree.make(rng.randrange(1, 12), 600)
        if are_windows:
            lanes = [cut_before(lane, max(0, offset - 300)) for lane, offset in zip(lanes, offsets, strict=True)]
        plan = make_plan(
            lanes, offsets, PlanShape(rng.choice([1, 8]), rng.choice([1, 4, 16]), 160, 4096, rng.choice([8, 264]))
        )
        made.append((lanes, offsets, plan))
    return made


@pytest.mark.parametrize("are_windows", [False, True])
def test_every_lane_sees_each_of_its_rows_once_where_it_lies(are_windows: bool) -> None:
    for lanes, _, plan in random_plans(are_windows):
        lying = {
            (lane, row): slot for lane, pieces in enumerate(lanes) for slot, low, high in pieces for row in range(low, high)
        }

        assert {at: slot for at, (slot, _, _) in rows_seen(plan).items()} == lying


def test_the_parts_of_a_lane_are_numbered_from_0_without_a_gap() -> None:
    for lanes, _, plan in random_plans(are_windows=False):
        parts = {(lane, part) for (lane, _), (_, part, _) in rows_seen(plan).items()}

        assert parts == {(lane, part) for lane in range(len(lanes)) for part in range(plan.parts[lane])}


def test_a_lane_grows_alone_in_the_pieces_that_end_beyond_its_offset() -> None:
    for lanes, offsets, plan in random_plans(are_windows=False):
        growing = {at for at, (_, _, kind) in rows_seen(plan).items() if kind == GROWING}

        assert growing == {
            (lane, row)
            for lane, pieces in enumerate(lanes)
            for _, low, high in pieces
            for row in range(low, high)
            if high > offsets[lane]
        }
        assert all(item[0] == 1 for item in plan.items if item[5] == GROWING)


def test_items_of_several_lanes_come_first_and_hold_as_many_lanes_as_allowed() -> None:
    plan = make_plan(lanes_on(10, 1024), [1024] * 10, shape(lanes_of_item=4))

    assert [item[0] for item in plan.items if item[4] == 0] == [2, 4, 4]
    assert plan.has_shared
    assert [item[0] > 1 for item in plan.items] == sorted((item[0] > 1 for item in plan.items), reverse=True)


def test_lanes_that_share_nothing_have_no_shared_item() -> None:
    assert not make_plan(lanes_on(4, 1024, are_distinct=True), [1024] * 4, shape(lanes_of_item=16)).has_shared


@pytest.mark.parametrize(
    ("num", "are_distinct", "lanes_of_item", "best"),
    [(1, False, 1, 256), (16, False, 16, 512), (64, False, 16, 1024), (16, True, 1, 2048)],
)
def test_items_have_as_many_rows_as_was_measured_best_at_8192(
    num: int, are_distinct: bool, lanes_of_item: int, best: int
) -> None:
    lanes = lanes_on(num, 8192, are_distinct=are_distinct)

    for offset in (8192, 8300, 8447):
        assert make_plan(lanes, [offset] * num, shape(lanes_of_item)).rows_of_item == best


def test_items_are_larger_where_the_buffers_take_few_parts() -> None:
    lanes = lanes_on(1, 8192)

    assert make_plan(lanes, [8192], shape(1, max_parts=17)).rows_of_item == 512
    assert make_plan(lanes, [8192], shape(1, max_parts=16)).rows_of_item == 1024


def test_a_plan_that_no_buffer_takes_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanTooLarge, match="5 parts and 5 items: the buffers take 4 parts and 4096 items"):
        make_plan(lanes_on(1, 8192), [8192], shape(1, max_parts=4))
    with pytest.raises(PlanTooLarge, match="5 parts and 32 items: the buffers take 160 parts and 31 items"):
        make_plan(lanes_on(16, 8192), [8192] * 16, shape(4, max_items=31))


def test_two_lanes_that_would_grow_in_the_same_piece_are_a_mistake() -> None:
    lane = lanes_on(1, 512)[0]

    with pytest.raises(AssertionError, match="a shared piece reaches beyond"):
        make_plan([lane, lane], [512, 512], shape(16))


@pytest.mark.parametrize(("past", "num"), [(0, 1), (0, 40), (700, 1), (600, 30), (250, 20), (1020, 9)])
def test_each_token_of_a_run_sees_the_rows_before_it_and_its_own(past: int, num: int) -> None:
    tree = RandomLanes(random.Random(past), PAGE)
    pieces = tree.extend(tree.extend(tree.extend([], max(0, past - 20)), past), past + num + 7)
    lying = {row: slot for slot, low, high in pieces for row in range(low, high)}

    plan = make_run_plan(pieces, past, num, PlanShape(2, 4, 160, 4096, 8))

    seen = rows_seen(plan)
    for token in range(num):
        visible = {
            row: slot
            for (each, row), (slot, _, kind) in seen.items()
            if each == token and (kind == WHOLE or row <= past + token)
        }
        assert visible == {row: lying[row] for row in range(past + token + 1)}
    assert all((row >= past) == (kind == CAUSAL) for (_, row), (_, _, kind) in seen.items())
    assert {(each, part) for (each, _), (_, part, _) in seen.items()} == {
        (each, part) for each in range(num) for part in range(plan.parts[each])
    }


def test_a_packed_plan_is_order_parts_and_items_ended_by_zeros_for_every_program() -> None:
    plan = make_plan(lanes_on(3, 512), [512, 600, 700], PlanShape(2, 4, 8, 16, 5))

    packed = plan.pack(5)

    assert packed[:10] == array("i", [*plan.order, 0, 0, *plan.parts, 0, 0])
    items = [tuple(packed[at : at + FIELDS]) for at in range(10, len(packed), FIELDS)]
    assert items == plan.items + [(0,) * FIELDS] * 4  # 5 programs over 2 heads look at 3 items beyond the last, or at 4


def test_places_follow_the_pieces() -> None:
    pieces = [(7, 100, 250), (3, 250, 256), (5, 256, 512)]

    assert find_places(pieces, 248, 258).tolist() == [
        *(7 * PAGE + row for row in (248, 249)),
        *(3 * PAGE + row for row in range(250, 256)),
        *(5 * PAGE + row for row in (0, 1)),
    ]
    with pytest.raises(AssertionError, match="12 of the rows"):
        find_places(pieces, 500, 520)
