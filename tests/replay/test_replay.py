"""Replays of a trace small enough to be worked out by hand, and what must hold for any."""

from __future__ import annotations

import random

import pytest

from bough.replay.replay import POLICIES, Result, replay
from bough.replay.strategies import ReplayTree
from bough.replay.trace import Trace, TraceRequest

SEVEN_BLOCKS = 7
FOUR_OF_SEVEN = 4.01 / SEVEN_BLOCKS


def trace_of(*prompts: list[int], reply: int = 0, block_tokens: int = 4) -> Trace:
    requests = []
    for number, prompt in enumerate(prompts):
        stored = prompt + [1000 * number + 100 + each for each in range(reply)]
        requests.append(TraceRequest(float(number), block_tokens * len(prompt), prompt, stored))
    return Trace("by hand", block_tokens, requests).renumbered()


A, B, C = [1, 2, 3], [1, 4, 5], [6, 7]
HAND = trace_of(A, B, A, C, A)  # 14 blocks are asked for


@pytest.mark.parametrize(
    ("policy", "reused", "evicted"),
    [
        # with room for four:   A: 123     B: 1 reused, 3 goes   A: 12 reused, 5 goes   C: 4 and 3 go   A: 12 reused, 7 goes
        ("lru", 5, 5),
        ("duel", 5, 5),
        # B: 1 reused, 23 go    A: 1 reused, 45 go    C: the whole of A goes    A: C goes
        ("nodes", 2, 9),
        # B: 1 reused, then A goes   A: 1 reused, then B goes   C: A goes   A: C goes
        ("copies", 2, 11),
        ("single", 2, 9),
        # 3 goes for B because B is running, 5 and 4 are never needed again, then as above
        ("belady", 5, 5),
    ],
)
def test_a_small_trace_comes_out_as_worked_out_by_hand(policy: str, reused: int, evicted: int) -> None:
    assert replay(HAND, policy, FOUR_OF_SEVEN) == Result(policy, FOUR_OF_SEVEN, reused / 14, evicted)


@pytest.mark.parametrize("policy", ["duel", "lru", "lru2", "nodes", "belady"])
def test_with_room_for_all_every_tree_reuses_what_an_unlimited_cache_does(policy: str) -> None:
    result = replay(HAND, policy, 1.0)
    assert result.reused_share == HAND.unlimited_share() == 7 / 14
    assert result.evictions == 0


def test_all_full_blocks_of_a_prompt_can_be_reused_and_replies_are_stored() -> None:
    tree = ReplayTree(budget=10)
    assert tree.serve(TraceRequest(0.0, 8, [1, 2], [1, 2, 3])) == 0
    assert tree.serve(TraceRequest(1.0, 8, [1, 2], [1, 2])) == 2
    assert tree.serve(TraceRequest(2.0, 12, [1, 2, 3], [1, 2, 3])) == 3


def test_partial_blocks_count_as_asked_for_and_never_as_reused() -> None:
    trace = Trace("partial", 4, [TraceRequest(0.0, 7, [0], [0]), TraceRequest(1.0, 7, [0], [0])])
    assert replay(trace, "duel", 1.0).reused_share == 4 / 14


def test_a_request_without_a_full_block_is_served() -> None:
    trace = Trace("short", 4, [TraceRequest(0.0, 3, [], []), TraceRequest(1.0, 4, [0], [0])])
    assert replay(trace, "duel", 1.0).reused_share == 0


def drawn(num_requests: int = 300) -> Trace:
    chance = random.Random(5)
    chats: list[list[int]] = [[0, 1]]
    prompts = []
    for number in range(num_requests):
        chat = [*chance.choice(chats[-12:])[: chance.randrange(2, 9)], 2 * number + 2, 2 * number + 3]
        chats.append(chat)
        prompts.append(chat)
    return trace_of(*prompts, reply=1, block_tokens=512)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_twice_gives_the_same_result(policy: str) -> None:
    trace = drawn()
    assert replay(trace, policy, 0.1) == replay(trace, policy, 0.1)


@pytest.mark.parametrize("budget", [0.02, 0.05])
def test_no_policy_reuses_more_than_the_offline_reference(budget: float) -> None:
    trace = drawn()
    shares = {policy: replay(trace, policy, budget).reused_share for policy in POLICIES}
    assert max(shares, key=lambda policy: shares[policy]) == "belady"


def test_where_chats_come_back_slowly_the_duel_reuses_more_than_recency() -> None:
    """Three chats that come back every 15 requests, among prompts that nobody asks again, and room for seven."""
    chats = [number // 5 % 3 if number % 5 == 0 else 10 + number for number in range(300)]
    trace = trace_of(*([4 * chat + step for step in range(4)] for chat in chats))
    budget = 7.01 / len(set(chats))
    assert replay(trace, "lru", budget).reused_share == 0
    assert replay(trace, "duel", budget).reused_share > 0.75 * trace.unlimited_share()


def test_the_tree_stays_whole_and_within_its_budget() -> None:
    trace, tree = drawn(), ReplayTree(budget=25)
    for request in trace.requests:
        tree.serve(request)
        tree.cache.check()
        assert tree.cache.memory.tree_bytes <= 25
