"""SCENARIOS.md, sessions 12 to 14: several lanes, prefixes that are just being computed, salts; and what is kept."""

from __future__ import annotations

import pytest

from bough.cache.session import Session
from bough.cache.tree.node import Reason
from bough.errors import DoesNotFit, EngineError, LanesBusy
from tests.scenarios.models import A, B, every_fake, every_model, every_page, world


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

    assert again.sequence.slot is second.sequence.slot
    assert again.cached == 4


@every_model
def test_12_an_idle_lane_of_another_salt_is_not_used(model: str) -> None:
    w = world(model)
    w.run(A, salt="a")

    assert w.run(A, salt="b").cached == 0


@every_fake
def test_12_idle_lanes_are_cleared_before_any_byte_of_the_tree(model: str) -> None:
    w = world(model, num_lanes=2)
    w.run(A)
    tree = w.cache.memory.tree_bytes
    spare_bytes = 0 if w.is_pooled else w.cache.memory.row_bytes
    w.set_budget(tree + w.cache.lanes.slots[1].lane.bytes_for(4) + spare_bytes)

    session = w.begin([50, 51, 52, 53])

    assert w.cache.memory.tree_bytes == tree
    assert sum(slot.lane.nbytes > 0 for slot in w.cache.lanes.slots) == 1
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
    w.set_budget(w.cache.lanes.nbytes + 2 * w.cache.memory.tree_bytes)  # the kept prefix and about three chats

    for chat in range(12):
        w.run([20 + chat, *range(40, 58)], reply=[1, 2])

    assert w.cache.residency.evictor.counts.tokens > 0 or w.cache.residency.evictor.counts.points > 0  # there was pressure
    assert w.run([*kept, 60]).cached == len(kept)


@every_model
def test_fifty_growing_turns_are_one_node_of_full_pages(model: str) -> None:
    w = world(model, 8, chunk=5)
    history: list[int] = []
    for turn in range(w.num_turns):
        done = w.run([*history, turn % 60, 1, 2, 3, 4], reply=[5, 6, 7, 8])
        history = done.tokens
    nodes = [node for node in w.cache.forest.tries[""].walk() if not node.is_root]

    assert len(nodes) == 1
    for pages in nodes[0].pages.values():
        if pages[0].group.kind.value == "full":
            assert sum(page.end - page.start < 8 for page in pages) <= 1


@every_model
def test_no_store_leaves_nothing_behind(model: str) -> None:
    w = world(model)
    session: Session = w.cache.begin(A, keep_state=False)
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
    trie = w.cache.forest.tries[""]
    for node in list(trie.walk()):
        for group, pages in node.pages.items():
            if group.kind.value == "full":
                trie.drop_page(node, pages[1])
    w.cache.lanes.slots[0].clear()
    w.check()

    assert w.run([*A, 9, 50]).cached <= (2 if w.cache.memory.row_bytes else 9)
    w.cache.lanes.slots[0].clear()
    assert w.run([*A, 9, 51]).cached >= 7
