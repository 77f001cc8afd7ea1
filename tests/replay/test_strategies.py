"""Where states of recurrent layers are placed, on traces small enough to be worked out by hand.

A block has 512 tokens, so that a state costs as much as the rows of three.
"""

from __future__ import annotations

import pytest

from bough.cache.tree.node import Reason
from bough.replay.replay import POLICIES, replay
from bough.replay.strategies import PlacedTree, SpacedTree, StateCosts
from bough.replay.trace import Trace, TraceRequest
from bough.types import Boundary, Mark
from tests.replay.test_replay import drawn, trace_of

BLOCK_TOKENS = 512
STATE = 3
EMPTY = Trace("by hand", BLOCK_TOKENS, [])
SPACED = ("spaced-512", "spaced-2048", "spaced-8192")


def request(*prompt: int, reply: tuple[int, ...] = (), at: float = 0.0, marks: tuple[Boundary, ...] = ()) -> TraceRequest:
    return TraceRequest(at, BLOCK_TOKENS * len(prompt), list(prompt), [*prompt, *reply], marks)


def point_reasons(tree: PlacedTree) -> dict[int, Reason]:
    """The restore points of a tree without branches."""
    nodes = (node for trie in tree.cache.forest.tries.values() for node in trie.walk())
    return {point.offset: point.reason for node in nodes for point in node.points.values()}


def test_a_conversation_goes_on_from_its_end_and_is_asked_again_from_its_prompt() -> None:
    tree = PlacedTree(EMPTY, budget=100)
    assert tree.serve(request(1, 2, reply=(3,), at=1.0)) == 0
    assert point_reasons(tree) == {2: Reason.PROMPT_END, 3: Reason.END}
    assert tree.serve(request(1, 2, 3, 4, at=2.0)) == 3
    assert tree.serve(request(1, 2, at=3.0)) == 2


def test_what_two_prompts_share_is_reused_by_the_third() -> None:
    tree = PlacedTree(EMPTY, budget=100)
    assert [tree.serve(request(1, 2, 3, 4, each, at=float(each))) for each in (5, 6, 7)] == [0, 0, 4]


def test_a_system_part_that_the_trace_tells_is_reused_by_the_second() -> None:
    tree, system = PlacedTree(EMPTY, budget=100), (Boundary(4, Mark.SYSTEM_END),)
    assert [tree.serve(request(1, 2, 3, 4, each, at=float(each), marks=system)) for each in (5, 6)] == [0, 4]


@pytest.mark.parametrize(("policy", "reused"), [("placed", 0), ("placed-chat", 4)])
def test_only_a_chat_can_go_back_to_its_last_user_message(policy: str, reused: int) -> None:
    tree, last = POLICIES[policy].make(EMPTY, 100), (Boundary(4, Mark.LAST_USER_START),)
    tree.serve(request(1, 2, 3, 4, 5, reply=(6,), at=1.0, marks=last))
    assert tree.serve(request(1, 2, 3, 4, 7, 8, at=2.0)) == reused


def test_spacing_makes_states_at_multiples_alone_and_stores_no_row_beyond_them() -> None:
    tree = SpacedTree(EMPTY, budget=100, spacing_tokens=4 * BLOCK_TOKENS)
    assert tree.serve(request(*range(9), reply=(9,), at=1.0, marks=(Boundary(2, Mark.SYSTEM_END),))) == 0
    assert point_reasons(tree) == {4: Reason.BRANCH, 8: Reason.BRANCH}
    assert tree.cache.memory.tree_bytes == 8 + 2 * STATE
    assert tree.serve(request(*range(7), at=2.0)) == 4
    assert tree.serve(request(*range(11), reply=(11,), at=3.0)) == 8
    assert point_reasons(tree) == dict.fromkeys((4, 8, 12), Reason.BRANCH)


def test_a_sequence_shorter_than_the_spacing_leaves_nothing() -> None:
    tree = SpacedTree(EMPTY, budget=100, spacing_tokens=4 * BLOCK_TOKENS)
    assert [tree.serve(request(1, 2, 3)), tree.serve(request(1, 2, 3))] == [0, 0]
    assert tree.cache.memory.tree_bytes == 0
    assert tree.state_costs == StateCosts(num_made=0, share=0.0)


def test_the_cost_of_states_is_their_mean_share_of_the_bytes_that_are_held() -> None:
    tree = PlacedTree(EMPTY, budget=9)
    tree.serve(request(1, 2, at=1.0))  # two rows, a state at 2
    assert tree.state_costs == StateCosts(num_made=1, share=3 / 5)
    tree.serve(request(5, 6, 7, 8, at=2.0))  # four rows, a state at 4, and the others go
    assert tree.state_costs == StateCosts(num_made=2, share=(3 / 5 + 3 / 7) / 2)
    assert tree.num_evicted == 2


@pytest.mark.parametrize(("block_tokens", "state_bytes"), [(16, 96), (512, 3), (4096, 1)])
def test_a_state_is_worth_1536_tokens_of_rows_and_at_least_one_block(block_tokens: int, state_bytes: int) -> None:
    tree = PlacedTree(Trace("by hand", block_tokens, []), budget=1000)
    tree.serve(request(1))
    assert tree.cache.memory.tree_bytes == 1 + state_bytes


def chats(num_chats: int, num_turns: int) -> Trace:
    """First 60 blocks that nobody asks again; then chats that share six and take turns of a block each for both sides."""
    requests = [request(*range(1000, 1060))]
    for turn in range(num_turns):
        for chat in range(num_chats):
            said = [100 * (chat + 1) + step for step in range(2 * turn + 2)]
            time_s = float(len(requests))
            requests.append(request(*range(6), *said[:-1], reply=(said[-1],), at=time_s))
    return Trace("chats", BLOCK_TOKENS, requests).renumbered()


def test_placing_reuses_more_than_any_spacing_where_chats_branch_and_go_on() -> None:
    trace = chats(num_chats=6, num_turns=5)
    placed = replay(trace, "placed", 1.0).reused_share
    # Of the first turns, two find no state where they branch and four find six blocks; every other goes on from an end.
    reused = 4 * 6 + 6 * (8 + 10 + 12 + 14)
    assert placed == reused / (60 + 6 * (7 + 9 + 11 + 13 + 15))
    for policy in SPACED:
        assert replay(trace, policy, 1.0).reused_share < placed


def test_with_room_for_all_the_densest_spacing_reuses_what_an_unlimited_cache_does() -> None:
    trace = chats(num_chats=3, num_turns=3)
    tree = POLICIES["spaced-512"].make(trace, 4 * trace.num_blocks)
    reused = sum(tree.serve(each) for each in trace.requests)
    assert reused * BLOCK_TOKENS / trace.prompt_tokens == trace.unlimited_share()
    assert tree.state_costs == StateCosts(trace.num_blocks, share=3 / 4)


@pytest.mark.parametrize("policy", ["placed", "placed-chat", *SPACED[:2]])
def test_rows_and_states_stay_within_one_budget(policy: str) -> None:
    trace = drawn()
    tree = POLICIES[policy].make(trace, 40)
    assert isinstance(tree, PlacedTree)
    for each in trace.requests:
        tree.serve(each)
        tree.cache.check()
        assert tree.cache.memory.tree_bytes <= 40
    assert tree.num_evicted > 0


def test_a_model_without_recurrent_layers_has_no_states_to_tell_of() -> None:
    trace = trace_of([1, 2], [1, 3], block_tokens=BLOCK_TOKENS)
    for policy in ("duel", "copies", "single", "belady"):
        result = replay(trace, policy, 1.0)
        assert result.states is None and result.state_share is None
