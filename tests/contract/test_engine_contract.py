"""What every engine must do with lanes, pages and states. The suite speaks the contract's words only."""

from __future__ import annotations

import math

import pytest

from bough.cache.tree.state import Group, GroupSource, Kind
from bough.types import Draw, SamplingParams
from tests import reference_sampler as reference
from tests.contract.conftest import EngineUnderTest
from tests.contract.driving import (
    answer,
    as_floats,
    give_back,
    is_close,
    items,
    keep,
    make_ids,
    new_lane,
    publish,
    rewind,
    run,
)

LENGTH = 90  # several windows of every engine here
LONG = 300  # across a page border


def row_groups(tested: EngineUnderTest) -> list[Group]:
    return [group for group in tested.engine.groups if group.kind is not Kind.RECURRENT]


def recurrent_groups(tested: EngineUnderTest) -> list[Group]:
    return [group for group in tested.engine.groups if group.kind is Kind.RECURRENT]


@pytest.mark.parametrize("sizes", [[LENGTH], [40, 1, 7, 42], [LENGTH - 6, 1, 1, 1, 1, 1, 1], [1] * LENGTH], ids=len)
def test_a_prompt_gives_the_same_logits_in_whatever_runs_it_is_evaluated(tested: EngineUnderTest, sizes: list[int]) -> None:
    ids = make_ids(tested.engine, LENGTH)

    logits = run(tested.engine, new_lane(tested.engine, LENGTH), ids, sizes)

    assert is_close(logits, answer(tested.engine, ids))


@pytest.mark.parametrize("sizes", [[], [40, 1, 7], [LENGTH - 1]], ids=len)
def test_the_last_hidden_state_is_the_same_in_whatever_runs_a_prompt_is_evaluated(
    tested: EngineUnderTest, sizes: list[int]
) -> None:
    engine, ids = tested.engine, make_ids(tested.engine, LENGTH)
    lane = new_lane(engine, LENGTH + 1)
    run(engine, lane, ids, sizes)

    state = engine.evaluate_state(lane, ids[lane.offset :])

    assert lane.offset == LENGTH and len(state) == engine.state_size > 0
    wanted = engine.evaluate_state(new_lane(engine, LENGTH), ids)
    assert math.dist(state, wanted) <= tested.rounding * math.hypot(*wanted)
    assert is_close(engine.step([lane], [5])[0], answer(engine, [*ids, 5]))  # and the lane goes on


def test_a_scored_run_tells_how_likely_the_next_token_was_after_each_of_its_own(tested: EngineUnderTest) -> None:
    engine, ids = tested.engine, make_ids(tested.engine, 12)
    lane, other = new_lane(engine, 20), new_lane(engine, 20)
    logits = [engine.evaluate(other, [token_id]) for token_id in ids]
    rows = [as_floats(each) for each in logits]
    expected = [reference.score(row, token_id, 2) for row, token_id in zip(rows, ids[1:], strict=False)]

    first = engine.evaluate_scored(lane, ids[:5], ids[1:6], 2)
    second = engine.evaluate_scored(lane, ids[5:], ids[6:], 2)

    assert lane.offset == 12 and is_close(second.logits, logits[-1])
    for found, wanted in zip([*first.scores, *second.scores], expected, strict=True):
        assert found.token_id == wanted.token_id
        near = [each.logprob for each in wanted.top]
        assert found.logprob == pytest.approx(wanted.logprob, abs=tested.rounding)
        assert [each.logprob for each in found.top] == pytest.approx(near, abs=tested.rounding)
    (sampled,) = engine.sample([second.logits], [Draw(SamplingParams())])
    assert is_close(engine.step([lane], [sampled.token_id])[0], answer(engine, [*ids, sampled.token_id]))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 22, 23, 24, 25, 60, 255, 256, 257, 290])
def test_a_lane_restored_at_an_offset_goes_on_as_if_it_had_been_there(tested: EngineUnderTest, offset: int) -> None:
    ids = make_ids(tested.engine, LONG)
    lane = new_lane(tested.engine, LONG)
    run(tested.engine, lane, ids, [offset])
    kept = keep(tested.engine, lane)
    lane.clear()

    lane.reserve(LONG)
    lane.adopt(offset, kept)
    logits = run(tested.engine, lane, ids, [LONG - offset])

    assert lane.offset == LONG
    assert is_close(logits, answer(tested.engine, ids))
    give_back(tested.engine, kept)


def test_a_restored_lane_goes_on_token_by_token(tested: EngineUnderTest) -> None:
    ids = make_ids(tested.engine, LENGTH)
    lane, other = new_lane(tested.engine, LENGTH), new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [LENGTH - 5])
    kept = keep(tested.engine, lane)

    other.adopt(LENGTH - 5, kept)

    assert is_close(run(tested.engine, other, ids, [1] * 5), answer(tested.engine, ids))
    give_back(tested.engine, kept)


def test_one_set_of_pages_serves_two_branches(tested: EngineUnderTest) -> None:
    ids, branch = make_ids(tested.engine, LENGTH), make_ids(tested.engine, 50) + make_ids(tested.engine, 40, seed=1)
    first, second = new_lane(tested.engine, LENGTH), new_lane(tested.engine, LENGTH)
    run(tested.engine, first, ids, [50])
    kept = keep(tested.engine, first)
    run(tested.engine, first, ids, [40])

    second.adopt(50, kept)

    assert is_close(run(tested.engine, second, branch, [20, 20]), answer(tested.engine, branch))
    give_back(tested.engine, kept)


def test_a_page_may_begin_before_the_rows_that_are_needed_and_end_after_them(tested: EngineUnderTest) -> None:
    ids = make_ids(tested.engine, LENGTH)
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [50])
    states = {group: lane.capture(group) for group in recurrent_groups(tested)}
    run(tested.engine, lane, ids, [20])
    pages = {group: publish(lane, group, lane.first_row(group), 70) for group in row_groups(tested)}
    kept = {group: GroupSource(state=states.get(group), pages=pages.get(group, ())) for group in tested.engine.groups}

    other = new_lane(tested.engine, LENGTH)
    other.adopt(50, kept)

    assert is_close(run(tested.engine, other, ids, [40]), answer(tested.engine, ids))
    give_back(tested.engine, kept)


def test_live_rows_and_pages_together_cover_a_full_group(tested: EngineUnderTest) -> None:
    full = [group for group in tested.engine.groups if group.kind is Kind.FULL]
    if not full:
        pytest.skip("the model has no full attention")
    ids, other_ids = make_ids(tested.engine, LENGTH), make_ids(tested.engine, 30) + make_ids(tested.engine, 60, seed=1)
    lane, other = new_lane(tested.engine, LENGTH), new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [60])
    kept = keep(tested.engine, lane)
    run(tested.engine, other, other_ids, [60])

    mixed = {group: GroupSource(live=30, pages=kept[group].pages) if group in full else kept[group] for group in kept}
    other.adopt(60, mixed)

    assert is_close(run(tested.engine, other, ids, [30]), answer(tested.engine, ids))
    give_back(tested.engine, kept)


@pytest.mark.parametrize("back", [1, 3, 30, 60])
def test_a_lane_rewinds_and_overwrites_in_small_pieces(tested: EngineUnderTest, back: int) -> None:
    ids = make_ids(tested.engine, LENGTH)
    offset = LENGTH - back
    branch = ids[:offset] + make_ids(tested.engine, back, seed=1)
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [offset])
    kept = keep(tested.engine, lane)
    run(tested.engine, lane, ids, [1] * back)

    rewind(tested.engine, lane, offset, kept)

    assert is_close(run(tested.engine, lane, branch, [1] * back), answer(tested.engine, branch))
    give_back(tested.engine, kept)


def test_adopting_offset_0_starts_anew(tested: EngineUnderTest) -> None:
    ids, other_ids = make_ids(tested.engine, LENGTH), make_ids(tested.engine, LENGTH, seed=1)
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, other_ids, [LENGTH])

    lane.adopt(0, {group: GroupSource() for group in tested.engine.groups})

    assert lane.offset == 0
    assert is_close(run(tested.engine, lane, ids, [LENGTH]), answer(tested.engine, ids))


def test_lanes_do_not_disturb_each_other(tested: EngineUnderTest) -> None:
    ids, other_ids = make_ids(tested.engine, LENGTH), make_ids(tested.engine, LENGTH, seed=1)
    lane, other = new_lane(tested.engine, LENGTH), new_lane(tested.engine, LENGTH)

    for _ in range(3):
        logits = run(tested.engine, lane, ids, [30])
        other_logits = run(tested.engine, other, other_ids, [15, 15])

    assert is_close(logits, answer(tested.engine, ids))
    assert is_close(other_logits, answer(tested.engine, other_ids))


def test_a_window_still_holds_what_its_last_run_could_see(tested: EngineUnderTest) -> None:
    ids = make_ids(tested.engine, LENGTH)
    lane = new_lane(tested.engine, LENGTH)

    for before, after in ((0, 40), (40, 80), (80, 81), (81, LENGTH)):
        run(tested.engine, lane, ids, [after - before])

        for group in row_groups(tested):
            assert lane.first_row(group) <= group.first_needed(before)
            for page in publish(lane, group, group.first_needed(before), after):
                tested.engine.release(page)


def test_a_state_is_adopted_at_exactly_its_offset(tested: EngineUnderTest) -> None:
    if not recurrent_groups(tested):
        pytest.skip("the model has no recurrent layers")
    ids = make_ids(tested.engine, LENGTH)
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [40])
    kept = keep(tested.engine, lane)

    for state in (lambda group: GroupSource(state=kept[group].state), lambda group: GroupSource(live=39)):
        with pytest.raises(AssertionError):
            lane.adopt(
                39, {group: state(group) if group in recurrent_groups(tested) else GroupSource(live=39) for group in kept}
            )

    give_back(tested.engine, kept)


def test_what_was_published_and_captured_does_not_change_with_the_lane(tested: EngineUnderTest) -> None:
    ids, other_ids = make_ids(tested.engine, LENGTH), make_ids(tested.engine, LENGTH, seed=1)
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, ids, [60])
    kept = keep(tested.engine, lane)
    before = [tested.engine.pack(item) for item in items(kept)]

    run(tested.engine, lane, ids, [30])
    rewind(tested.engine, lane, 60, kept)
    run(tested.engine, lane, other_ids, [1, 2, 27])
    lane.adopt(0, {group: GroupSource() for group in kept})
    run(tested.engine, lane, other_ids, [50, 20])
    lane.clear()

    assert [tested.engine.pack(item) for item in items(kept)] == before
    give_back(tested.engine, kept)


def test_a_page_keeps_no_more_memory_alive_than_its_own(tested: EngineUnderTest) -> None:
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, make_ids(tested.engine, LENGTH), [LENGTH])

    for group in row_groups(tested):
        page = lane.publish(group, LENGTH - 3, LENGTH)
        assert tested.storage_bytes(page) == page.nbytes == 3 * group.bytes_per_token
        left, right = tested.engine.cut(page, LENGTH - 1)
        assert tested.storage_bytes(left) == left.nbytes == 2 * group.bytes_per_token
        assert tested.storage_bytes(right) == right.nbytes == group.bytes_per_token
        whole = tested.engine.join(left, right)
        assert tested.storage_bytes(whole) == whole.nbytes == 3 * group.bytes_per_token
        tested.engine.release(whole)


def test_cutting_and_joining_give_what_publishing_would_have_given(tested: EngineUnderTest) -> None:
    engine = tested.engine
    lane = new_lane(engine, LENGTH)
    run(engine, lane, make_ids(engine, LENGTH), [LENGTH])

    for group in row_groups(tested):
        whole, left, right = (lane.publish(group, *rows) for rows in ((70, 90), (70, 77), (77, 90)))
        wanted = [engine.pack(page) for page in (left, right, whole)]
        joined = engine.join(left, right)
        pieces = engine.cut(whole, 77)

        assert [engine.pack(page) for page in (*pieces, joined)] == wanted
        assert [(page.start, page.end) for page in (*pieces, joined)] == [(70, 77), (77, 90), (70, 90)]
        for page in (*pieces, joined):
            engine.release(page)


def test_packing_and_unpacking_is_exact(tested: EngineUnderTest) -> None:
    engine = tested.engine
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [60])
    kept = keep(engine, lane)
    unpacked = {}
    for group, source in kept.items():
        pages = tuple(engine.unpack_page(group, page.start, page.end, engine.pack(page)) for page in source.pages)
        state = engine.unpack_state(group, 60, engine.pack(source.state)) if source.state else None
        unpacked[group] = GroupSource(pages=pages, state=state)

    assert [engine.pack(item) for item in items(unpacked)] == [engine.pack(item) for item in items(kept)]
    assert [item.nbytes for item in items(unpacked)] == [item.nbytes for item in items(kept)]
    lane.adopt(60, unpacked)
    assert is_close(run(engine, lane, ids, [30]), answer(engine, ids))
    give_back(engine, kept)
    give_back(engine, unpacked)


def test_packed_content_of_another_size_is_refused_with_the_numbers(tested: EngineUnderTest) -> None:
    engine = tested.engine
    lane = new_lane(engine, LENGTH)
    run(engine, lane, make_ids(engine, LENGTH), [60])
    kept = keep(engine, lane)

    for group, source in kept.items():
        for item in items({group: source}):
            data = engine.pack(item)[:-1]
            with pytest.raises(ValueError, match=f"{len(data):,}|{len(data)}"):
                if group.kind is Kind.RECURRENT:
                    engine.unpack_state(group, 60, data)
                else:
                    engine.unpack_page(group, item.start, item.end, data)
    give_back(engine, kept)


def test_states_and_pages_have_the_size_that_their_group_tells(tested: EngineUnderTest) -> None:
    lane = new_lane(tested.engine, LENGTH)
    run(tested.engine, lane, make_ids(tested.engine, LENGTH), [LENGTH])
    kept = keep(tested.engine, lane)

    for group, source in kept.items():
        if group.kind is Kind.RECURRENT and lane.shares_rows:  # a state has a slot, which may be larger
            (state,) = items({group: source})
            assert state.nbytes == tested.engine.device_bytes(state) >= group.needed_bytes(LENGTH)
        else:
            assert sum(item.nbytes for item in items({group: source})) == group.needed_bytes(LENGTH)
    give_back(tested.engine, kept)


def test_a_lane_tells_beforehand_what_it_will_occupy(tested: EngineUnderTest) -> None:
    ids = make_ids(tested.engine, LONG)
    lane = tested.engine.make_lane()
    assert lane.nbytes == 0

    for num_tokens in (10, 20, LONG, 20, 700, 701, 1500):
        wanted = lane.bytes_for(num_tokens)
        assert wanted >= lane.nbytes
        lane.reserve(num_tokens)
        assert lane.nbytes == wanted
        run(tested.engine, lane, ids, [10])
        assert lane.nbytes == wanted

    lane.clear()
    assert (lane.nbytes, lane.offset) == (0, 0)


def test_live_rows_survive_growing(tested: EngineUnderTest) -> None:
    ids = make_ids(tested.engine, LONG)
    lane = new_lane(tested.engine, 100)
    run(tested.engine, lane, ids, [100])

    lane.reserve(LONG)

    assert is_close(run(tested.engine, lane, ids, [LONG - 100]), answer(tested.engine, ids))


def test_windows_and_states_do_not_grow_with_the_sequence(tested: EngineUnderTest) -> None:
    lane = tested.engine.make_lane()
    growth = lane.bytes_for(20_000) - lane.bytes_for(10_000)
    full = sum(group.bytes_per_token for group in tested.engine.groups if group.kind is Kind.FULL)

    assert growth <= full * (10_000 + 256)


def test_a_step_of_many_lanes_equals_evaluating_each_alone(tested: EngineUnderTest) -> None:
    prompts = [make_ids(tested.engine, length, seed=length) for length in (2, 30, 61, LENGTH)]
    lanes = [new_lane(tested.engine, LENGTH) for _ in prompts]
    for lane, prompt in zip(lanes, prompts, strict=True):
        run(tested.engine, lane, prompt, [len(prompt) - 3 if len(prompt) > 3 else 1])

    tested.engine.step(lanes[1:], [prompt[-3] for prompt in prompts[1:]])
    tested.engine.step(lanes[:0:-1], [prompt[-2] for prompt in prompts[:0:-1]])
    logits = tested.engine.step(lanes, [prompt[-1] for prompt in prompts])

    for lane, prompt, found in zip(lanes, prompts, logits, strict=True):
        assert lane.offset == len(prompt)
        assert is_close(found, answer(tested.engine, prompt))


def test_a_lane_that_was_stepped_with_others_can_be_kept_and_restored(tested: EngineUnderTest) -> None:
    prompts = [make_ids(tested.engine, 50, seed=seed) for seed in (1, 2)]
    lanes = [new_lane(tested.engine, 60) for _ in prompts]
    for lane, prompt in zip(lanes, prompts, strict=True):
        run(tested.engine, lane, prompt, [40])
    tested.engine.step(lanes, [prompt[40] for prompt in prompts])
    kept = keep(tested.engine, lanes[1])

    lanes[0].adopt(41, kept)

    assert is_close(run(tested.engine, lanes[0], prompts[1], [9]), answer(tested.engine, prompts[1]))
    give_back(tested.engine, kept)
