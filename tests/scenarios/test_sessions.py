"""SCENARIOS.md, sessions 1 to 14, over every kind of model and two page sizes.

On the fake engine every step is checked token by token; on torch with tiny random models of each architecture every forward
pass is compared with an uncached one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from bough.cache.node import Reason
from bough.cache.session import Session
from bough.errors import DoesNotFit, EngineError, LanesBusy, RequestError
from bough.types import Boundary, Mark
from tests.fakes import MODELS
from tests.scenarios.torch_world import ARCHITECTURES, TorchWorld
from tests.scenarios.world import World

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 5, 30, 31, 32]

every_model = pytest.mark.parametrize("model", [*MODELS, *(f"torch:{name}" for name in ARCHITECTURES)])
every_fake = pytest.mark.parametrize("model", MODELS)
every_page = pytest.mark.parametrize("page_tokens", [2, 256])


def world(model: str, page_tokens: int = 2, **settings: Any) -> World:
    if model.startswith("torch:"):
        return TorchWorld(model.removeprefix("torch:"), page_tokens, **settings)
    return World(MODELS[model], page_tokens, **settings)


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
    assert second.computed == (3 if w.is_full_only else 8) or w.is_torch_window
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
    row, states = w.row_and_state_bytes
    budget = 2 * 48 * row + w.cache.slots[0].lane.bytes_for(48) + 12 * states
    w.set_budget(budget)
    chats = [[*system, 50 + chat] for chat in range(5)]
    cached_by_system = 0
    for turn in range(30):
        chat = chats[turn % 5]
        boundaries = [Boundary(len(system), Mark.SYSTEM_END)]
        done = w.run(chat, reply=[chance.randrange(60) for _ in range(3)], boundaries=boundaries)
        assert w.cache.room.used_bytes <= budget
        cached_by_system += turn >= 5 and done.cached >= len(system)
        if len(chat) < 40:
            chat += [*done.tokens[len(chat) :], chance.randrange(60), chance.randrange(60)]
    assert cached_by_system == 25


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
        assert not w.cache.slots[0].is_busy

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
    nodes = sum(1 for _ in w.cache.tries[""].walk())

    session = w.begin([1, 2, 3, 4, 5, 6])
    w.prefill(session)
    w.close(session)

    assert sum(1 for _ in w.cache.tries[""].walk()) == nodes
    assert w.begin([1, 2, 3, 4, 5, 6, 50]).cached == 6


@every_model
def test_12_two_lanes_on_one_path_and_on_parting_paths(model: str) -> None:
    w = world(model, num_lanes=2)
    first, second = w.begin(A, max_new=4), w.begin(B, max_new=4)
    while any([w.prefill_chunk(first), w.prefill_chunk(second)]):
        pass
    w.decode(first, [9])
    w.decode(second, [33])
    w.close(first)
    w.decode(second, [34])
    w.close(second)

    assert w.run([*A, 9, 50]).computed == 1
    assert w.run([*B, 33, 34, 51]).computed == 1


@every_model
@every_page
def test_12_both_continue_after_one_partial_page(model: str, page_tokens: int) -> None:
    w = world(model, page_tokens, num_lanes=2)
    w.run(A[:5])
    first, second = w.begin([*A[:5], 20, 21]), w.begin([*A[:5], 22, 23])
    w.prefill(first)
    w.prefill(second)
    w.close(second)
    w.close(first)

    assert first.cached == second.cached == 5
    assert w.run([*A[:5], 20, 21, 40]).computed == 1
    assert w.run([*A[:5], 22, 23, 41]).computed == 1


@every_model
def test_12_more_requests_than_lanes_are_told_so(model: str) -> None:
    w = world(model, num_lanes=2)
    w.begin(A)
    w.begin(B)
    with pytest.raises(LanesBusy, match="2 lanes"):
        w.begin([1, 2])
    w.check()


@every_model
def test_12_the_lane_chosen_already_holds_most_of_the_prompt(model: str) -> None:
    w = world(model, num_lanes=3)
    first, second = w.begin(A), w.begin([30, 31, 32, 33])
    for session in (first, second):
        w.prefill(session)
        w.close(session)

    again = w.begin([30, 31, 32, 33, 34])

    assert again.slot is second.slot
    assert again.cached == 4


@every_model
def test_12_a_resting_lane_of_another_salt_is_not_used(model: str) -> None:
    w = world(model)
    w.run(A, salt="a")

    assert w.run(A, salt="b").cached == 0


@every_fake
def test_12_resting_lanes_are_cleared_before_any_byte_of_the_tree(model: str) -> None:
    w = world(model, num_lanes=2)
    w.run(A)
    tree = w.cache.memory.tree_bytes
    w.set_budget(tree + w.cache.slots[1].lane.bytes_for(4) + w.cache.costs.row_bytes)

    session = w.begin([50, 51, 52, 53])

    assert w.cache.memory.tree_bytes == tree
    assert sum(slot.lane.nbytes > 0 for slot in w.cache.slots) == 1
    session.close()


@every_model
def test_12_a_request_that_can_never_fit_is_refused_with_both_numbers(model: str) -> None:
    w = world(model, budget_bytes=60)
    with pytest.raises(DoesNotFit) as refused:
        w.begin(list(range(1, 60)), max_new=100)
    w.check()
    assert refused.value.budget_bytes == 60
    assert str(60) in str(refused.value) and f"{refused.value.needed_bytes:,}" in str(refused.value)
    assert not refused.value.can_wait


@every_model
def test_13_a_waiting_request_finds_what_the_leader_has_published(model: str) -> None:
    w = world(model, num_lanes=2)
    prompt = list(range(1, 21))
    leader = w.begin(prompt)
    leader.schedule(9, Reason.BRANCH)
    while leader.offset < 12:
        w.prefill_chunk(leader)

    follower = w.begin([*prompt[:9], 50, 51])

    assert follower.cached == 9
    w.close(leader)
    w.prefill(follower)
    w.close(follower)


@every_model
def test_13_when_the_leader_is_cancelled_or_fails_the_oldest_waiter_goes_on(model: str) -> None:
    prompt = list(range(1, 21))
    for fails in (False, True):
        w = world(model, num_lanes=2)
        leader = w.begin(prompt)
        leader.schedule(6, Reason.BRANCH)
        while leader.offset < 6:
            w.prefill_chunk(leader)
        if fails:
            w.engine.fail_next = "evaluate"
            with pytest.raises(EngineError):
                w.prefill_chunk(leader)
        w.close(leader)

        assert w.begin(prompt).cached >= 6


@every_model
def test_14_equal_prompts_under_two_salts_share_nothing(model: str) -> None:
    w = world(model, num_lanes=2)
    for salt in ("", "a", "b"):
        assert w.run(A, salt=salt).cached == 0
    for salt in ("", "a", "b"):
        assert w.run(A, salt=salt).computed == 1


@every_model
def test_a_kept_prefix_outlives_everything_else(model: str) -> None:
    w = world(model)
    kept = list(range(1, 13))
    w.run(kept, keep=True)
    w.run([19, *range(40, 58)], reply=[1, 2])
    w.set_budget(w.cache.room.lane_bytes + 2 * w.cache.memory.tree_bytes)  # the kept prefix and about three chats

    for chat in range(12):
        w.run([20 + chat, *range(40, 58)], reply=[1, 2])

    assert w.cache.memory.counts.tokens > 0 or w.cache.memory.counts.points > 0  # there was pressure
    assert w.run([*kept, 60]).cached == len(kept)


@every_model
def test_fifty_growing_turns_are_one_node_of_full_pages(model: str) -> None:
    w = world(model, 8, chunk=5)
    history: list[int] = []
    for turn in range(w.num_turns):
        done = w.run([*history, turn % 60, 1, 2, 3, 4], reply=[5, 6, 7, 8])
        history = done.tokens
    nodes = [node for node in w.cache.tries[""].walk() if not node.is_root]

    assert len(nodes) == 1
    for pages in nodes[0].pages.values():
        if pages[0].group.kind.value == "full":
            assert sum(page.end - page.start < 8 for page in pages) <= 1


@every_model
def test_no_store_leaves_nothing_behind(model: str) -> None:
    w = world(model)
    session: Session = w.cache.begin(A, store=False)
    w.sessions = [session]
    w.prefill(session)
    w.close(session)

    assert w.known(A) == 0
    assert w.run(A).cached == 0


@every_fake
def test_a_publish_that_fails_leaves_the_tree_whole_and_the_lane_free(model: str) -> None:
    w = world(model)
    session = w.begin(A)
    w.prefill_chunk(session)
    w.engine.fail_next = "publish"
    with pytest.raises(EngineError):
        while w.prefill_chunk(session):
            pass
        w.engine.fail_next = None
        raise EngineError("this model publishes no rows here")
    w.close(session)

    assert w.run(A).tokens == A


@every_model
def test_a_lost_page_is_a_miss_and_is_filled_again(model: str) -> None:
    w = world(model)
    w.run(A, reply=[9, 10])
    trie = w.cache.tries[""]
    for node in list(trie.walk()):
        for group, pages in node.pages.items():
            if group.kind.value == "full":
                trie.lose(node, pages[1])
    w.cache.room.clear_slot(w.cache.slots[0])
    w.check()

    assert w.run([*A, 9, 50]).cached <= (2 if w.cache.costs.row_bytes else 9)
    w.cache.room.clear_slot(w.cache.slots[0])
    assert w.run([*A, 9, 51]).cached >= 7
