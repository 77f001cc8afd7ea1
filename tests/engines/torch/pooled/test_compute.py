"""Steps and runs over a pool: one step ahead of the caller, which may do something else, and lanes in many pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bough.cache.tree.state import GroupSource
from bough.engines.shared.compute import RunResult
from bough.engines.torch.pooled import graphs, static_batch
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.errors import EngineError
from tests.engines.torch.pooled.parts import GREEDY, Parts, failing, items_of, make_ids, make_parts, watching

NAMES = ("llama", "gemma3_text", "qwen3_next")


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest) -> Parts:
    return make_parts(request.param)


@pytest.fixture(scope="module")
def made_llama() -> Parts:
    return make_parts("llama")


@pytest.fixture(scope="module")
def made_recurrent() -> Parts:
    return make_parts("qwen3_next")


@pytest.fixture
def parts(made: Parts) -> Iterator[Parts]:
    """Each kind of model; what a test leaves in the pool fails it."""
    with made.empty_afterwards() as parts:
        yield parts


@pytest.fixture
def llama(made_llama: Parts) -> Iterator[Parts]:
    with made_llama.empty_afterwards() as parts:
        yield parts


@pytest.fixture
def recurrent(made_recurrent: Parts) -> Iterator[Parts]:
    with made_recurrent.empty_afterwards() as parts:
        yield parts


def begin(parts: Parts, *lengths: int) -> tuple[list[PooledTorchLane], list[list[int]], list[torch.Tensor]]:
    """Lanes that hold prompts of these lengths, the prompts, and the logits after them."""
    prompts = [make_ids(length, seed=length) for length in lengths]
    lanes = [parts.lane(300) for _ in prompts]
    return lanes, prompts, [parts.compute.evaluate(lane, ids) for lane, ids in zip(lanes, prompts, strict=True)]


def test_tokens_chosen_and_fed_one_by_one_are_those_without_a_cache(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 30, 251)  # the last crosses the border of a page

    for _ in range(8):
        for ids, row in zip(texts, logits, strict=True):
            assert parts.is_answer(row, ids)
        chosen = parts.sample(*logits)
        for ids, token_id in zip(texts, chosen, strict=True):
            ids.append(token_id)
        logits = parts.compute.step(lanes, chosen)


def test_a_step_with_the_chosen_tokens_is_computed_once_while_they_are_chosen(parts: Parts) -> None:
    lanes, _, logits = begin(parts, 5, 30)

    with watching(parts) as seen:
        chosen = parts.sample(*logits)
        assert seen.shapes == [(2, 1)]
        parts.compute.step(lanes, chosen)
        assert seen.shapes == [(2, 1)]

    assert [lane.offset for lane in lanes] == [6, 31]


def test_a_step_with_another_token_on_one_lane_computes_that_one_only(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 30)
    chosen = parts.sample(*logits)
    chosen[1] = 3 if chosen[1] != 3 else 4

    with watching(parts) as seen:
        logits = parts.compute.step(lanes, chosen)

    assert seen.shapes == [(1, 1)]
    for ids, token_id, row in zip(texts, chosen, logits, strict=True):
        assert parts.is_answer(row, [*ids, token_id])
    again = parts.compute.step(lanes, [7, 8])
    for ids, token_id, last, row in zip(texts, chosen, (7, 8), again, strict=True):
        assert parts.is_answer(row, [*ids, token_id, last])


def test_lanes_that_leave_a_step_and_come_back_later_go_on_where_they_stood(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 30, 12)
    chosen = parts.sample(*logits)

    with watching(parts) as seen:
        first, last = parts.compute.step([lanes[2], lanes[0]], [chosen[2], chosen[0]])
    assert not seen.shapes
    (late,) = parts.compute.step([lanes[1]], [chosen[1]])

    assert [lane.offset for lane in lanes] == [6, 31, 13]
    for ids, token_id, row in zip(texts, chosen, (last, late, first), strict=True):
        assert parts.is_answer(row, [*ids, token_id])


def test_a_lane_that_joins_a_step_is_computed_beside_those_that_were_ahead(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 30, 12)
    chosen = parts.sample(*logits[:2])

    with watching(parts) as seen:
        found = parts.compute.step([lanes[2], lanes[1], lanes[0]], [9, chosen[1], chosen[0]])

    assert seen.shapes == [(1, 1)]
    for ids, row in zip(([*texts[2], 9], [*texts[1], chosen[1]], [*texts[0], chosen[0]]), found, strict=True):
        assert parts.is_answer(row, ids)


@pytest.mark.parametrize("num", [1, 4, 280])
def test_a_run_on_a_lane_drops_what_was_computed_ahead_on_it(parts: Parts, num: int) -> None:
    lanes, texts, logits = begin(parts, 5, 12)
    chosen = parts.sample(*logits)
    more = make_ids(num, seed=50)

    logits[0] = parts.compute.evaluate(lanes[0], more)

    assert parts.is_answer(logits[0], [*texts[0], *more])
    found = parts.compute.step(lanes, chosen)
    assert parts.is_answer(found[0], [*texts[0], *more, chosen[0]])
    assert parts.is_answer(found[1], [*texts[1], chosen[1]])


def test_a_lane_that_is_cleared_meanwhile_is_stepped_as_a_new_one(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 12)
    chosen = parts.sample(*logits)
    lanes[0].clear()
    lanes[0].reserve(10)

    found = parts.compute.step(lanes, chosen)

    assert [lane.offset for lane in lanes] == [1, 13]
    assert parts.is_answer(found[0], chosen[:1])
    assert parts.is_answer(found[1], [*texts[1], chosen[1]])


def test_a_lane_that_adopts_what_another_holds_meanwhile_goes_on_from_there(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 12, 15)
    kept = parts.keep(lanes[1])
    chosen = parts.sample(*logits)
    lanes[0].adopt(15, kept)

    found = parts.compute.step(lanes, [chosen[0], chosen[1]])

    assert parts.is_answer(found[0], [*texts[1], chosen[0]])
    assert parts.is_answer(found[1], [*texts[1], chosen[1]])
    parts.release(kept)


def test_what_is_kept_and_captured_does_not_change_by_steps_in_vain(parts: Parts) -> None:
    (lane,), (ids,), (logits,) = begin(parts, 20)
    kept = parts.keep(lane)
    before = [bytes(parts.pages.pack(item) or b"") for item in items_of(kept)]

    for _ in range(3):
        parts.sample(logits)
    again = parts.keep(lane)

    assert lane.offset == 20
    assert [bytes(parts.pages.pack(item) or b"") for item in items_of(kept)] == before
    assert [bytes(parts.pages.pack(item) or b"") for item in items_of(again)] == before
    other = parts.lane(300)
    other.adopt(20, kept)
    assert parts.is_answer(parts.compute.step([other], [5])[0], [*ids, 5])
    assert parts.is_answer(parts.compute.step([lane], [6])[0], [*ids, 6])
    parts.release(kept)
    parts.release(again)


def test_a_lane_rewound_to_before_the_step_in_vain_goes_on_from_there(llama: Parts) -> None:
    (lane,), (ids,), (logits,) = begin(llama, 20)
    llama.sample(logits)

    lane.adopt(17, {group: GroupSource(live=17) for group in llama.layout.groups})

    assert llama.is_answer(llama.compute.step([lane], [9])[0], [*ids[:17], 9])


def test_a_lane_without_room_is_left_out_of_the_step_ahead(llama: Parts) -> None:
    full, free = llama.lane(256), llama.lane(300)
    logits = [llama.compute.evaluate(full, make_ids(256)), llama.compute.evaluate(free, make_ids(9))]

    with watching(llama) as seen:
        chosen = llama.sample(*logits)
        assert seen.shapes == [(1, 1)]
        full.reserve(257)
        found = llama.compute.step([full, free], chosen)

    assert seen.shapes == [(1, 1)] * 2
    assert llama.is_answer(found[0], [*make_ids(256), chosen[0]])
    assert llama.is_answer(found[1], [*make_ids(9), chosen[1]])


def test_no_step_goes_beyond_the_context() -> None:
    parts = make_parts("llama", context=10)
    lanes = [parts.lane(10), parts.lane(10)]

    with watching(parts) as seen:
        parts.sample(parts.compute.evaluate(lanes[0], make_ids(10)))
        parts.sample(parts.compute.evaluate(lanes[1], make_ids(9)))

    assert [shape for shape in seen.shapes if shape == (1, 1)] == [(1, 1)]


def test_nothing_is_computed_ahead_for_logits_that_are_not_the_latest_of_a_lane(parts: Parts) -> None:
    (lane,), _, (old,) = begin(parts, 5)
    parts.compute.evaluate(lane, [7])

    with watching(parts) as seen:
        parts.sample(old)
        parts.sample(torch.randn(97))

    assert not seen.shapes


def test_any_number_of_rows_can_be_sampled(llama: Parts) -> None:
    """None, if a step has failed for all requests; many, if the settings allow as many lanes."""
    _, _, (logits,) = begin(llama, 5)

    assert llama.sample() == []
    assert llama.sample(*[logits] * 300) == [int(logits.argmax())] * 300


def test_a_row_that_cannot_be_sampled_leaves_the_other_lanes_right(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 12)
    bad = torch.full_like(logits[0], float("nan"))
    with pytest.raises(EngineError):
        parts.compute.sample([logits[0], bad, logits[1]], [GREEDY] * 3)

    chosen = parts.sample(*logits)
    found = parts.compute.step(lanes, chosen)

    for ids, token_id, row in zip(texts, chosen, found, strict=True):
        assert parts.is_answer(row, [*ids, token_id])


def test_a_step_ahead_that_fails_is_told_by_the_step_itself_and_changes_nothing(parts: Parts) -> None:
    lanes, texts, logits = begin(parts, 5, 12)

    with failing(parts):
        chosen = parts.sample(*logits)
        with pytest.raises(RuntimeError, match="made to fail"):
            parts.compute.step(lanes, chosen)

    assert [lane.offset for lane in lanes] == [5, 12]
    for ids, token_id, row in zip(texts, chosen, parts.compute.step(lanes, chosen), strict=True):
        assert parts.is_answer(row, [*ids, token_id])


def test_a_step_ahead_is_dropped_when_a_run_on_its_lane_fails(llama: Parts) -> None:
    (lane,), (ids,), (logits,) = begin(llama, 40)
    (token_id,) = llama.sample(logits)
    with failing(llama), pytest.raises(RuntimeError, match="made to fail"):
        llama.compute.evaluate(lane, [token_id % 90 + 7, 5, 6])  # writes where the step ahead has put its row

    llama.compute.step([lane], [token_id])

    assert llama.is_answer(llama.compute.step([lane], [9])[0], [*ids, token_id, 9])


def test_a_state_that_a_failed_run_has_damaged_is_not_stepped_on(recurrent: Parts) -> None:
    lanes, texts, logits = begin(recurrent, 5, 12)
    with failing(recurrent), pytest.raises(RuntimeError):
        recurrent.compute.evaluate(lanes[0], [3, 4, 5])

    with watching(recurrent) as seen:
        recurrent.sample(*logits)

    assert seen.shapes == [(1, 1)]
    with pytest.raises(AssertionError, match="a run failed on this lane"):
        recurrent.compute.step(lanes, [7, 8])
    assert recurrent.is_answer(recurrent.compute.step([lanes[1]], [8])[0], [*texts[1], 8])


def test_lanes_of_which_one_is_new_are_stepped_one_by_one_if_they_have_states(recurrent: Parts) -> None:
    lanes = [recurrent.lane(20, make_ids(5)), recurrent.lane(20)]

    found = recurrent.compute.step(lanes, [7, 8])

    assert recurrent.is_answer(found[0], [*make_ids(5), 7])
    assert recurrent.is_answer(found[1], [8])


def test_more_lanes_than_a_step_takes_are_stepped_in_turns(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LARGEST_STEP", 2)
    lanes, texts, logits = begin(parts, 5, 12, 7, 3, 9)

    with watching(parts) as seen:
        chosen = parts.sample(*logits)
        found = parts.compute.step(lanes, chosen)
        again = parts.compute.step(lanes, [3, 4, 5, 6, 7])

    assert seen.shapes == [(2, 1), (2, 1), (1, 1)] * 2
    for ids, token_id, row, last, next_row in zip(texts, chosen, found, (3, 4, 5, 6, 7), again, strict=True):
        assert parts.is_answer(row, [*ids, token_id])
        assert parts.is_answer(next_row, [*ids, token_id, last])


def test_every_token_of_a_scored_run_has_its_logits(parts: Parts) -> None:
    ids = make_ids(9)
    lane = parts.lane(20, ids[:4])

    rows = parts.compute.run(lane, ids[4:], RunResult.ALL_LOGITS)

    assert lane.offset == 9
    for number, row in enumerate(rows, start=5):
        assert parts.is_answer(row, ids[:number])


def scatter(parts: Parts, ids: list[int], size: int) -> list[PooledTorchLane]:
    """Lanes of which the last holds `ids` in pieces of so many rows: each goes on from the one before, in its own slot."""
    lanes = [parts.lane(300)]
    while lanes[-1].offset < len(ids):
        offset = lanes[-1].offset + size
        parts.compute.evaluate(lanes[-1], ids[offset - size : offset])
        kept = parts.keep(lanes[-1])
        lanes.append(parts.lane(300))
        lanes[-1].adopt(offset, kept)
        parts.release(kept)
    return lanes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_parts", [160, 4])
def test_a_lane_in_more_pieces_than_a_plan_takes_gives_the_same_logits(
    name: str, max_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_batch, "_MAX_PARTS", max_parts)
    parts = make_parts(name, budget_bytes=32 << 20)  # twelve lanes: for a window, each reserves four slots
    ids, other = make_ids(30), make_ids(12, seed=12)
    chain = scatter(parts, ids, size=3)
    lanes = [chain[-1], parts.lane(300, other)]
    assert len(lanes[0].rows_of(parts.row_groups[-1]).pieces) == 10

    with watching(parts) as seen:
        logits = parts.compute.step(lanes, [7, 8])
    assert seen.shapes == ([(2, 1)] if max_parts == 160 else [(1, 1), (1, 1)])
    assert parts.is_answer(logits[0], [*ids, 7])
    assert parts.is_answer(logits[1], [*other, 8])
    chosen = parts.sample(*logits)
    for token_id, row, text in zip(chosen, parts.compute.step(lanes, chosen), ([*ids, 7], [*other, 8]), strict=True):
        assert parts.is_answer(row, [*text, token_id])
    run = make_ids(5, seed=5)
    assert parts.is_answer(parts.compute.evaluate(lanes[0], run), [*ids, 7, chosen[0], *run])
