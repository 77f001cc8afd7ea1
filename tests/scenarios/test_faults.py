"""What must hold when memory is short, when a call fails, and when requests cannot fit: found by review, kept by tests."""

from __future__ import annotations

import pytest

from bough.cache.admin.view import look_up
from bough.errors import DoesNotFit, EngineError
from bough.tokens import common_prefix, pack
from bough.types import Boundary
from tests import invariants
from tests.fakes import MODELS
from tests.scenarios.models import copying_lanes
from tests.scenarios.world import World

pytestmark = pytest.mark.usefixtures("lane_kind")

every_model = pytest.mark.parametrize("model", MODELS)
A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 9, 9, 9, 9, 9, 9]


@every_model
@pytest.mark.parametrize("error", [EngineError, MemoryError])
@pytest.mark.parametrize("salts", [("", ""), ("alice", "bob")])
def test_a_lane_whose_last_record_failed_is_not_taken_for_what_it_held_before(
    model: str, error: type[Exception], salts: tuple[str, str]
) -> None:
    w = World(MODELS[model], 4)
    w.run(A, salt=salts[0])
    session = w.begin(B, salt=salts[1])
    chunk = session.next_chunk(99)
    with session.feeding(chunk):
        w.engine.evaluate(session.lane, chunk)
    w.engine.fail_next = "capture" if "recurrent" in model else "publish"
    w.engine.fail_with = error
    w.close(session)

    again = w.run([*A, 5], salt=salts[1])

    assert again.tokens == [*A, 5]
    assert salts[0] == salts[1] or again.cached <= common_prefix(pack(A), pack(B))  # of B, if it was recorded after all


def test_a_request_that_can_never_fit_takes_nothing_from_the_others() -> None:
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=1000)
    for number in range(3):
        w.run([number * 10 + i for i in range(10)])
    with pytest.raises(DoesNotFit):
        w.begin([50] * 10, max_new=100_000)
    assert w.stats()["tokens"] == 30


@pytest.mark.parametrize("where", ["cut", "join"])
@pytest.mark.parametrize("error", [EngineError, MemoryError])
def test_a_page_that_cannot_be_cut_or_joined_leaves_the_tree_whole(where: str, error: type[Exception]) -> None:
    w = World(MODELS["full"], 8, chunk=3)
    w.run([1, 2, 3, 4, 5, 6])
    w.engine.fail_next, w.engine.fail_with = where, error
    session = w.begin([1, 2, 3, 9, 9, 9] if where == "cut" else [20, 21, 22, 23, 24, 25])
    if where == "cut":
        with pytest.raises(error):
            w.prefill(session)
    else:
        w.prefill(session)  # the pages stay apart
    w.close(session)
    assert w.run([1, 2, 3, 9, 9, 9]).tokens == [1, 2, 3, 9, 9, 9]


@pytest.mark.parametrize("where", ["capture", "publish"])
def test_a_restore_point_is_made_whole_or_not_at_all(where: str) -> None:
    w = World(MODELS["window+recurrent+full"], 4)
    session = w.begin([1, 2, 3, 4, 5])
    w.engine.fail_next = where
    with pytest.raises(EngineError):
        w.prefill(session)
    w.check()
    for trie in w.cache.forest.tries.values():
        for node in trie.walk():
            assert all(point.states for point in node.points.values())
    w.close(session)


@copying_lanes
@pytest.mark.parametrize("model", ["full+window", "window"])
def test_a_branch_reached_by_going_back_on_the_lane_leaves_a_restore_point(model: str) -> None:
    w = World(MODELS[model], 4)
    chat = list(range(20))
    w.run(chat)
    for group in w.cache.memory.groups:  # a lane that still holds every row, as a window buffer with slack does
        first, tokens = w.cache.lanes.slots[0].lane.held[group]  # type: ignore[attr-defined]
        w.cache.lanes.slots[0].lane.held[group] = (0, chat[:first] + tokens)  # type: ignore[attr-defined]
    assert w.run([*chat[:15], 50, 51, 52, 53, 54, 55]).cached == 15
    w.run([60] * 5)

    assert w.run([*chat[:15], 57]).cached == 15


@copying_lanes
def test_lane_and_tree_that_do_not_fit_together_still_reuse_what_the_lane_holds() -> None:
    w = World(MODELS["full"], 4, budget_bytes=170)
    w.run(list(range(10)))  # 80 bytes on the lane, 80 in the tree
    assert w.begin(list(range(12))).cached == 10


def test_growing_turns_near_the_budget_compute_little_more_than_what_is_new() -> None:
    w = World(MODELS["full"], 4, budget_bytes=110 * 8)
    history: list[int] = []
    computed = []
    for turn in range(9):
        history = [*history, *range(turn, turn + 10)]
        computed.append(w.run(history).computed)
    assert computed == [10] * 9


@pytest.mark.parametrize("model", ["full+window", "window", "full"])
def test_a_record_that_does_not_fit_whole_keeps_what_does(model: str) -> None:
    w = World(MODELS[model], 4, budget_bytes=900, chunk=4)
    w.run([1, 2, 3, 4, 5, 6])
    w.run([7, 8, 9, 10, 11])
    w.run(list(range(60)))
    w.cache.lanes.slots[0].clear()
    assert w.cache.count_reusable([*range(60), 1]) > 0


@copying_lanes
@pytest.mark.parametrize(("model", "budget_bytes"), [("window", 92), ("full+window", 516)])
def test_with_room_for_one_restore_point_an_answer_has_it_at_its_end(model: str, budget_bytes: int) -> None:
    w = World(MODELS[model], 4, budget_bytes=budget_bytes)
    session = w.begin(range(6), max_new=21)
    w.prefill(session)
    session.schedule(14)  # a branch point within the answer, which is worth more than an end
    w.decode(session, range(10, 30))
    tokens = list(session.tokens)
    w.close(session)
    w.cache.lanes.slots[0].clear()

    assert w.cache.count_reusable([*tokens, 99]) == len(tokens)


def test_a_begin_that_fails_after_adoption_gives_lane_and_pin_back() -> None:
    w = World(MODELS["full+recurrent"], 4)
    with pytest.raises(KeyError):
        w.cache.begin([1, 2, 3, 4], boundaries=[Boundary(2, "system end")])  # type: ignore[arg-type]
    w.check()
    assert not w.cache.lanes.slots[0].is_busy


def test_roots_that_were_emptied_by_others_go() -> None:
    w = World(MODELS["full"], 4, budget_bytes=500)
    for number in range(100):
        w.run(list(range(10)), salt=f"tenant {number}")
    assert all(not trie.root.is_leaf for trie in w.cache.forest.tries.values())
    assert len(w.cache.forest.tries) < 10


@copying_lanes
def test_a_lane_that_shares_nothing_with_the_prompt_starts_small_again() -> None:
    w = World(MODELS["full"], 4, budget_bytes=1000)
    w.run(list(range(60)))
    w.run([61, 62, 63, 60, 61])
    assert w.cache.lanes.nbytes == 5 * 8


def test_clearing_leaves_only_what_a_busy_lane_stands_on() -> None:
    w = World(MODELS["full"], 4)
    w.run(list(range(12)))
    w.run([*range(10), 50, 51])
    session = w.begin(list(range(5)))
    w.cache.upkeep.clear()
    w.check()
    assert w.stats()["tokens"] == 4
    w.close(session)


@copying_lanes
def test_looking_says_what_beginning_does() -> None:
    w = World(MODELS["full"], 4, budget_bytes=80)
    w.run(list(range(10)))  # all of it fits only on the lane
    assert w.cache.count_reusable(list(range(10))) == w.begin(list(range(10))).cached == 9
    assert look_up(w.cache, b"", "").explain(b"", str).cached_tokens == 0


@copying_lanes
def test_a_refusal_counts_what_running_requests_stand_on() -> None:
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=200)
    session = w.begin(list(range(10)))
    w.prefill(session)
    with pytest.raises(DoesNotFit) as refused:
        w.begin([50] * 8)
    assert refused.value.busy_bytes == 160
    assert refused.value.can_wait


def test_a_lane_that_cannot_be_cleared_is_not_trusted() -> None:
    w = World(MODELS["full"], 4)
    w.run([1, 2, 3, 4])
    lane = w.cache.lanes.slots[0].lane

    def fail() -> None:
        raise EngineError("made to fail")

    lane.clear = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        w.cache.lanes.slots[0].clear()
    assert w.cache.lanes.slots[0].tokens == b""


def test_the_oracle_and_the_cache_agree_after_faults() -> None:
    w = World(MODELS["full+window"], 4)
    w.run(A)
    w.engine.fail_next = "adopt"
    with pytest.raises(EngineError):
        w.begin([*A, 9])
    w.check()
    assert w.cache.count_reusable([*A, 9]) == invariants.reusable(w.cache, [*A, 9])
