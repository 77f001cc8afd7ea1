"""Lanes over a pool: rows by reference, branches inside a page, states in two slots, memory given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bough.cache.tree.state import PAGE_TOKENS, GroupSource
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.errors import EngineError
from tests.engines.torch.pooled.parts import Parts, items_of, make_ids, make_parts
from tests.engines.torch.pooled.test_wiring import ON_POOL

WRONG_WHEN_CHUNKED = {"jamba", "nemotron_h", "recurrent_gemma"}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def made(request: pytest.FixtureRequest) -> Parts:
    return make_parts(request.param)


@pytest.fixture
def parts(made: Parts) -> Iterator[Parts]:
    with made.empty_afterwards() as parts:
        yield parts


@pytest.fixture(scope="module")
def made_recurrent() -> Parts:
    return make_parts("falcon_h1")


@pytest.fixture
def recurrent(made_recurrent: Parts) -> Iterator[Parts]:
    with made_recurrent.empty_afterwards() as parts:
        yield parts


def used_slots(parts: Parts) -> dict[str, int]:
    """How many slots lanes have in each group."""
    return {
        group.kind.value: len({id(piece.slot) for lane in parts.lanes for piece in lane.rows_of(group).pieces})
        for group in parts.row_groups
    }


def free_slots(parts: Parts) -> list[int]:
    """How many slots of each group could be promised now."""
    arena = parts.arena
    return [
        max(num for num in range(arena.num_slots(group) + 1) if arena.can_promise(group, num))
        for group in parts.layout.groups
    ]


@pytest.mark.parametrize("name", [name for name in ON_POOL if name not in WRONG_WHEN_CHUNKED])
def test_every_architecture_reads_only_what_was_written(name: str) -> None:
    parts = make_parts(name)
    ids, other = make_ids(270), make_ids(40, seed=1)
    lanes = [parts.lane(300, ids[:250]), parts.lane(300)]
    parts.compute.evaluate(lanes[0], ids[250:262])
    for token_id in ids[262:269]:
        parts.compute.step([lanes[0]], [token_id])
    parts.compute.evaluate(lanes[1], other[:-1])

    logits = parts.compute.step(lanes, [ids[-1], other[-1]])

    assert parts.is_answer(logits[0], ids)
    assert parts.is_answer(logits[1], other)


def test_lanes_on_one_prefix_hold_its_slots_once(parts: Parts) -> None:
    prefix = make_ids(PAGE_TOKENS)
    first = parts.lane(300, prefix)
    kept = parts.keep(first)
    states = sum(each.nbytes for lane in parts.lanes for each in lane.states)
    used = parts.arena.used_bytes - states

    others = [parts.lane(300) for _ in range(4)]
    for lane in others:
        lane.adopt(PAGE_TOKENS, kept)

    states = sum(each.nbytes for lane in parts.lanes for each in lane.states)
    assert parts.arena.used_bytes - states == used
    logits = parts.compute.step(others, [3, 4, 5, 6])
    for token_id, row in zip((3, 4, 5, 6), logits, strict=True):
        assert parts.is_answer(row, [*prefix, token_id])
    assert used_slots(parts)["full"] == 1 + len(others)
    parts.release(kept)


@pytest.mark.parametrize("at", [5, 60, PAGE_TOKENS + 20])
def test_a_branch_inside_a_page_goes_on_in_a_slot_of_its_own_and_changes_nothing_before_it(parts: Parts, at: int) -> None:
    trunk = make_ids(at)
    lane = parts.lane(400, trunk)
    kept = parts.keep(lane)
    before = [bytes(parts.pages.pack(item) or b"") for item in items_of(kept)]
    branches = [parts.lane(400) for _ in range(2)]
    for branch in branches:
        branch.adopt(at, kept)
    tails = [make_ids(6, seed) for seed in (1, 2, 3)]
    lanes = [lane, *branches]

    for each, tail in zip(lanes, tails, strict=True):
        parts.compute.evaluate(each, tail[:3])
    for number in range(3, 6):
        logits = parts.compute.step(lanes, [tail[number] for tail in tails])

    for row, tail in zip(logits, tails, strict=True):
        assert parts.is_answer(row, [*trunk, *tail])
    last = [each.rows_of(parts.row_groups[-1]).pieces[-1] for each in lanes]
    assert len({id(piece.slot) for piece in last}) == 3
    assert [piece.start % PAGE_TOKENS for piece in last[1:]] == [at % PAGE_TOKENS] * 2
    assert [bytes(parts.pages.pack(item) or b"") for item in items_of(kept)] == before
    parts.release(kept)


def test_a_lane_goes_on_in_the_slot_of_a_page_that_nobody_writes_any_more(parts: Parts) -> None:
    ids = make_ids(20)
    lane, other = parts.lane(300, ids), parts.lane(300)
    kept = parts.keep(lane)
    slot = lane.rows_of(parts.row_groups[-1]).pieces[-1].slot
    lane.clear()

    other.adopt(20, kept)

    assert parts.is_answer(parts.compute.step([other], [5])[0], [*ids, 5])
    assert other.rows_of(parts.row_groups[-1]).pieces[-1].slot is slot
    parts.release(kept)


def test_a_window_gives_slots_back_as_it_moves_on() -> None:
    parts = make_parts("gemma3_text")
    lane, ids = parts.lane(1500), make_ids(1400)

    for start in range(0, 1400, 200):
        logits = parts.compute.evaluate(lane, ids[start : start + 200])
        assert used_slots(parts)["window"] <= 2
    assert parts.is_answer(logits, ids)
    assert used_slots(parts) == {"window": 2, "full": 6}  # the last run began in the one before the last


def test_a_lane_without_any_room_left_for_it_is_refused_and_takes_nothing() -> None:
    parts = make_parts("llama", budget_bytes=1 << 20)
    lane = parts.lane(1024, make_ids(9))
    before = parts.arena.used_bytes

    with pytest.raises(EngineError, match=r"8 more slots of 262,144 bytes cannot be promised"):
        parts.lane(2048)

    assert parts.arena.used_bytes == before
    assert parts.is_answer(parts.compute.step([lane], [5])[0], [*make_ids(9), 5])


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_lane_that_nobody_refers_to_gives_its_slots_back_when_the_next_is_made(name: str) -> None:
    parts = make_parts(name)
    used, free = parts.arena.used_bytes, free_slots(parts)
    parts.lane(300, make_ids(20))
    assert parts.arena.used_bytes > used
    assert free_slots(parts) != free

    parts.lanes.clear()
    with parts.arena._lock:  # the collector may run while a slot is being taken: it must wait for nobody
        gc.collect()
    parts.compute.make_lane()

    parts.arena.check()
    assert parts.arena.used_bytes == used
    assert free_slots(parts) == free


def states_of(lane: PooledTorchLane) -> list[bytes]:
    return [bytes(state.bytes.numpy()) for state in lane.states]


def test_a_state_moves_to_its_other_slot_with_each_step_and_stays_in_place_in_a_run(recurrent: Parts) -> None:
    lane = recurrent.lane(300, make_ids(20))
    (state,) = lane.states
    sides = [state.side]

    recurrent.compute.step([lane], [5])
    sides.append(state.side)
    recurrent.compute.evaluate(lane, [6, 7, 8])
    sides.append(state.side)
    recurrent.compute.step([lane], [9])
    sides.append(state.side)

    assert sides == [0, 1, 1, 0]
    assert len({slot.index for slot in state.slots}) == 2
    assert state.nbytes == state.full_bytes == 2 * recurrent.arena.slot_bytes(state.group)


def test_a_captured_state_has_a_slot_of_its_own_and_does_not_follow_the_lane(recurrent: Parts) -> None:
    ids = make_ids(20)
    lane = recurrent.lane(300, ids)
    before, used = states_of(lane), recurrent.arena.used_bytes
    (group,) = recurrent.layout.states

    state = lane.capture(group)
    recurrent.compute.step([lane], [5])
    recurrent.compute.evaluate(lane, [6, 7])

    assert recurrent.arena.used_bytes == used + recurrent.arena.slot_bytes(group)
    assert [bytes(recurrent.pages.pack(state) or b"")] == before != states_of(lane)
    assert state.nbytes == group.state_bytes <= recurrent.arena.slot_bytes(group)
    recurrent.pages.release(state)
    assert recurrent.arena.used_bytes == used


def test_a_lane_that_starts_anew_does_not_see_the_state_that_its_slots_had(recurrent: Parts) -> None:
    lane = recurrent.lane(300, make_ids(40, seed=1))
    lane.adopt(0, {group: GroupSource() for group in recurrent.layout.groups})
    assert recurrent.is_answer(recurrent.compute.evaluate(lane, make_ids(9)), make_ids(9))

    lane.clear()
    lane.reserve(300)
    assert recurrent.is_answer(recurrent.compute.evaluate(lane, [4]), [4])


def test_a_state_is_captured_and_adopted_at_its_side(recurrent: Parts) -> None:
    ids = make_ids(21)
    lane, other = recurrent.lane(300, ids[:20]), recurrent.lane(300, make_ids(7, seed=7))
    recurrent.compute.step([lane, other], [ids[20], 5])  # both states are in their second slots now
    kept = recurrent.keep(lane)

    other.adopt(21, kept)

    assert states_of(other) == states_of(lane)
    logits = recurrent.compute.step([other, lane], [8, 9])
    assert recurrent.is_answer(logits[0], [*ids, 8])
    assert recurrent.is_answer(logits[1], [*ids, 9])
    recurrent.release(kept)


def test_states_are_not_shared_by_lanes_that_are_stepped_in_turns(recurrent: Parts) -> None:
    texts = [make_ids(length, seed=length) for length in (4, 9, 15)]
    lanes = [recurrent.lane(300, ids) for ids in texts]
    for chosen in ([0, 1, 2], [2, 0], [1], [1, 2, 0], [0, 1]):
        tokens = [10 + number for number in chosen]
        logits: list[torch.Tensor] = recurrent.compute.step([lanes[number] for number in chosen], tokens)
        for number, token_id, row in zip(chosen, tokens, logits, strict=True):
            texts[number].append(token_id)
            assert recurrent.is_answer(row, texts[number])
