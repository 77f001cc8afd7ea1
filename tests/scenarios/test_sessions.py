"""SCENARIOS.md, sessions 1 to 11, over every kind of model and two page sizes.

On the fake engine every step is checked token by token; on torch with tiny random models of each architecture every forward
pass is compared with an uncached one.
"""

from __future__ import annotations

import random

import pytest

from bough.errors import EngineError, RequestError
from bough.types import Boundary, Mark
from tests.scenarios.models import A, B, every_model, every_page, world


@every_model
@every_page
def test_01_an_empty_tree_computes_the_whole_prompt_and_remembers_what_was_fed(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)

    done = w.run(A, reply=[9, 10])

    assert (done.cached, done.computed) == (0, 8)
    assert w.known([*A, 9, 10]) == 9  # 10 was sampled, never fed


@every_model
@every_page
def test_02_a_prompt_that_parts_leaves_a_restore_point_where_it_parted(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    w.run(A, reply=[9, 10])

    second = w.run(B)
    third = w.run([1, 2, 3, 4, 5, 40, 41])

    assert second.matched == 5
    assert second.computed == (3 if w.is_full_only or w.has_wide_window else 8)  # a wide window goes back on its lane
    assert second.tokens == B
    assert third.cached == 5


@every_model
@every_page
def test_03_going_back_to_the_first_conversation_computes_what_is_new(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    first = w.run(A, reply=[9, 10])
    w.run(B)

    back = w.run([*first.tokens, 11, 12, 13])

    assert back.computed == 3
    assert back.tokens == [*first.tokens, 11, 12, 13]


@every_model
@every_page
def test_04_the_same_prompt_twice_computes_exactly_one_token(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    w.run(A, reply=[9, 10])

    assert w.run(A).computed == 1
    assert w.run(A).computed == 1


@every_model
@every_page
def test_05_growing_turns_compute_only_the_new_turn(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    history: list[int] = []
    for turn in range(10):
        prompt = [*history, 10 + turn, 20 + turn, 30 + turn]
        done = w.run(prompt, reply=[40 + turn, 50 + turn])
        assert done.computed == len(prompt) - len(history)
        history = done.tokens


@every_model
@every_page
def test_05_an_altered_reply_still_reuses_the_prompt_before_it(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    history: list[int] = []
    before = 0
    for turn in range(10):
        prompt = [*history, 10 + turn, 20 + turn, 30 + turn]
        done = w.run(prompt, reply=[40 + turn, 50 + turn, 60])
        assert done.cached >= before - (0 if w.is_full_only or not turn else 1)
        before = len(prompt)
        history = [*prompt, 63]  # the client changed the reply


@every_model
@every_page
def test_06_a_first_branch_at_any_message_boundary_already_hits(model: str, page_tokens: int) -> None:
    chance = random.Random(6)
    w = world(model, page_tokens)
    prompt, offsets = [], []
    for message in range(20):
        prompt += [message % 7, *(chance.randrange(60) for _ in range(chance.randrange(2, 6)))]
        offsets.append(len(prompt))
    boundaries = [Boundary(at, Mark.MESSAGE_END) for at in offsets]
    w.run(prompt, reply=[1, 2], boundaries=boundaries)

    for visit in range(w.num_visits):
        at = chance.choice(offsets[:-1])
        branch = [*prompt[:at], 60 + visit % 4, visit % 60, 5 + visit // 60]
        done = w.run(branch, boundaries=[each for each in boundaries if each.offset <= at])
        assert done.cached >= at


@every_model
def test_07_a_budget_for_two_of_five_conversations_is_kept_and_answers_stay_right(model: str) -> None:
    chance = random.Random(7)
    system = [chance.randrange(60) for _ in range(16)]
    w = world(model, num_lanes=2)
    budget = w.chats_bytes(2, 48, num_states=12) + w.cache.lanes.slots[0].lane.bytes_for(48)
    w.set_budget(budget)
    chats = [[*system, 50 + chat] for chat in range(5)]
    cached_by_system = 0
    for turn in range(30):
        chat = chats[turn % 5]
        boundaries = [Boundary(len(system), Mark.SYSTEM_END)]
        done = w.run(chat, reply=[chance.randrange(60) for _ in range(3)], boundaries=boundaries)
        assert w.cache.residency.room.used_bytes <= budget
        cached_by_system += turn >= 5 and done.cached >= len(system)
        if len(chat) < 40:
            chat += [*done.tokens[len(chat) :], chance.randrange(60), chance.randrange(60)]
    assert cached_by_system == 25


@every_model
def test_sessions_of_one_agent_are_restored_at_the_end_of_its_tools_and_at_that_of_its_system_text(model: str) -> None:
    w = world(model)
    tools, here, there = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14], [31, 32, 33]
    ends = [Boundary(len(tools), Mark.SYSTEM_END), Boundary(len(tools + here), Mark.SYSTEM_END)]
    w.run([*tools, *here, 20, 21], boundaries=ends)

    in_another_folder = w.run([*tools, *there, 20, 21])
    with_another_question = w.run([*tools, *here, 22, 23])

    assert in_another_folder.cached == len(tools)
    assert with_another_question.cached == len(tools + here)


@every_model
@every_page
def test_08_cancelled_anywhere_the_retry_goes_on_from_there(model: str, page_tokens: int) -> None:
    prompt = list(range(1, 14))
    for stop_after in range(5):
        w = world(model, page_tokens)
        session = w.begin(prompt, max_new=3)
        for _ in range(stop_after):
            w.prefill_chunk(session)
        reached = session.offset
        w.close(session)
        assert not w.cache.lanes.slots[0].is_busy

        retry = w.begin(prompt, max_new=3)
        assert retry.cached == min(reached, len(prompt) - 1)
        w.prefill_chunk(retry)
        further = retry.offset
        w.close(retry)
        assert w.begin(prompt, max_new=3).cached == min(further, len(prompt) - 1)


@every_model
def test_08_cancelled_while_decoding_keeps_what_was_fed(model: str) -> None:
    for fed in range(4):
        w = world(model)
        session = w.begin(A, max_new=4)
        w.prefill(session)
        w.decode(session, [9, 10, 11][:fed])
        w.close(session)
        session.close()  # a second close changes nothing

        assert w.run([*A, *[9, 10, 11][:fed], 40]).computed == 1


@every_model
@every_page
@pytest.mark.parametrize("groups_done", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_09_an_engine_that_fails_in_mid_forward_leaves_no_half_made_state(
    model: str, page_tokens: int, groups_done: int, where: str
) -> None:
    w = world(model, page_tokens)
    session = w.begin(A, max_new=3)
    w.prefill_chunk(session)
    recorded = session.offset
    if where == "decode":
        w.prefill(session)
        recorded = session.prompt_tokens
        w.decode(session, [9])
    w.engine.fail_next, w.engine.fail_after_groups = "evaluate", groups_done
    with pytest.raises(EngineError), session:
        if where == "decode":
            w.decode(session, [10])
        else:
            w.prefill_chunk(session)
    w.check()

    retry = w.begin(A)
    assert retry.cached <= recorded
    if w.is_full_only:
        assert retry.cached == min(recorded, len(A) - 1)
    w.prefill(retry)
    w.close(retry)
    assert retry.tokens.tolist() == A


@every_model
@every_page
def test_10_prompts_of_every_shape(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens)
    w.run(A, reply=[9, 10, 11, 12])
    whole = [*A, 9, 10, 11]
    for prompt in ([1, 2, 3], [1], whole, [*whole, 20, 21, 22], [60, 61], A[:5], [1]):
        done = w.run(prompt)
        assert done.tokens == prompt
        assert done.computed >= 1
        assert w.run(prompt).computed == 1


def test_10_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="0 tokens"):
        world("full").begin([])


@pytest.mark.parametrize("model", ["full+recurrent", "recurrent", "window+recurrent+full"])
def test_11_a_close_inside_an_edge_attaches_the_missing_state_without_a_split(model: str) -> None:
    w = world(model)
    w.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], reply=[11, 12, 13])
    nodes = sum(1 for _ in w.cache.forest.tries[""].walk())

    session = w.begin([1, 2, 3, 4, 5, 6])
    w.prefill(session)
    w.close(session)

    assert sum(1 for _ in w.cache.forest.tries[""].walk()) == nodes
    assert w.begin([1, 2, 3, 4, 5, 6, 50]).cached == 6
