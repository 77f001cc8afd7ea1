"""Replays over several replicas: what each way reuses, what is told of the trees, the bound, and the command."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.replicas.replica import digest_of
from benchmarks.replicas.routes import LongestPrefix, PowerOfTwo, RoundRobin, SoonestRoute
from benchmarks.replicas.simulation import BOUND, ROUTES, Cluster, ClusterResult, ClusterSetup, replay_cluster
from bough.replay.replay import replay
from bough.replay.trace import Trace, TraceRequest
from bough.routing.index import key_of
from bough.tokens import unpack

BLOCK = 512


def request(prompt: list[int], time_s: float = 0.0, reply: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(time_s, BLOCK * len(prompt), prompt, [*prompt, *reply])


def chats(num_chats: int = 12, num_turns: int = 8, seed: int = 3) -> Trace:
    """Conversations that take turns after one system prompt of two blocks."""
    chance, requests, fresh = random.Random(seed), list[TraceRequest](), iter(range(2, 10**6))
    histories = [[0, 1] for _ in range(num_chats)]
    for turn in range(num_chats * num_turns):
        history = chance.choice(histories)
        history.extend(next(fresh) for _ in range(3))
        reply = next(fresh)
        requests.append(request(list(history), float(turn), (reply,)))
        history.append(reply)
    return Trace("chats", BLOCK, requests).renumbered()


def test_the_soonest_route_keeps_conversations_together_and_round_robin_does_not() -> None:
    trace, setup = chats(), ClusterSetup(4, 1.0, is_budget_each=True, load=0.5)
    reused = {name: replay_cluster(trace, setup, name).reused_share for name in [*ROUTES, BOUND]}
    assert reused[BOUND] == trace.unlimited_share()
    assert reused["round-robin"] < 0.6 * reused[BOUND]
    assert reused["soonest"] > 0.9 * reused[BOUND]


def test_with_one_replica_every_way_is_the_plain_replay() -> None:
    trace = chats()
    plain = replay(trace, "duel", 0.3).reused_share
    for name in [*ROUTES, BOUND]:
        result = replay_cluster(trace, ClusterSetup(1, 0.3), name)
        assert (result.reused_share, result.imbalance) == (plain, 1.0)


def test_the_router_knows_in_the_end_what_the_trees_hold() -> None:
    trace, setup = chats(), ClusterSetup(3, 0.4)
    cluster = Cluster(trace, setup, "soonest")
    cluster.run()
    assert isinstance(cluster.route, SoonestRoute)
    cluster.route.router.check()
    index = cluster.route.router.index
    assert not any(known.needs_listing for known in index.replicas.values())
    for number, replica in enumerate(cluster.replicas):
        replica.tree.cache.check()
        held = {
            block
            for trie in replica.tree.cache.forest.tries.values()
            for node in trie.walk()
            for block in unpack(node.edge)
        }
        assert held == set(replica.engine.held)
        blocks = range(trace.num_blocks)
        assert held == {block for block in blocks if str(number) in index.match([key_of(digest_of(block))], {})}
        assert len(held) <= setup.tree_blocks(trace, 3)


def test_a_replay_repeats_exactly() -> None:
    for name in ROUTES:
        assert replay_cluster(chats(), ClusterSetup(4, 0.3), name) == replay_cluster(chats(), ClusterSetup(4, 0.3), name)


def test_times_are_scaled_to_the_load() -> None:
    trace = Trace("apart", BLOCK, [request([number], 10.0 * number) for number in range(21)])
    setup = ClusterSetup(2, 1.0, load=0.5, prefill_tokens_s=512.0)  # a second for each request
    assert setup.time_scale(trace) * 200 == 21 / (2 * 0.5)
    result = replay_cluster(trace, setup, "round-robin")
    assert result.first_token_s == result.p95_s == 1.0  # one each 1.05 s, by turns at two replicas: nobody waits
    assert result.busy_share == pytest.approx(21 / (2 * 22))


def test_the_budget_is_that_of_all_or_of_each() -> None:
    trace = chats()
    assert ClusterSetup(4, 0.4).tree_blocks(trace, 4) == int(0.1 * trace.num_blocks)
    assert ClusterSetup(4, 0.4, is_budget_each=True).tree_blocks(trace, 4) == int(0.4 * trace.num_blocks)


def test_longest_prefix_follows_a_match_of_more_than_three_tenths_unless_loads_differ_much() -> None:
    route = LongestPrefix(4, BLOCK)
    home = route.choose(0, request([1, 2, 3, 4, 5, 6, 7]), 0.0)
    assert route.choose(1, request([1, 2, 3, 4, *range(20, 26)]), 0.0) == home  # 4 of 10
    assert route.choose(2, request([1, 2, 3, *range(30, 37)]), 0.0) != home  # 3 of 10 are not more than 0.3
    sent = [route.choose(number, request([1, 2, 3, 4]), 0.0) for number in range(3, 90)]
    home = sent[0]
    assert set(sent[:60]) == {home}
    assert len(set(sent)) > 1  # more than 64 apart, and more than half
    for _ in range(route.loads[home]):
        route.finished(home)
    assert route.loads[home] == 0


def test_round_robin_and_power_of_two_know_nothing_of_prefixes() -> None:
    turns = RoundRobin(3)
    assert [turns.choose(number, request([1]), 0.0) for number in range(5)] == [0, 1, 2, 0, 1]
    two = PowerOfTwo(2)
    for number in range(10):
        two.choose(number, request([1]), 0.0)
    assert two.loads == [5, 5]


def test_a_store_brings_what_another_replica_has_when_that_one_is_busy() -> None:
    system, tails = list(range(8)), [list(range(100 + 4 * number, 104 + 4 * number)) for number in range(24)]
    at_once = [request([*system, *tail], time_s=1.0 + number / 1000) for number, tail in enumerate(tails)]
    trace = Trace("at once", BLOCK, [request([*system, 99]), *at_once]).renumbered()
    setup = ClusterSetup(4, 1.0, is_budget_each=True, load=4.0)
    alone, copying = (replay_cluster(trace, setup, name) for name in ("soonest", "soonest-copying"))
    assert copying.reused_share == trace.unlimited_share() > alone.reused_share
    assert copying.first_token_s < alone.first_token_s
    slow = replay_cluster(trace, ClusterSetup(4, 1.0, is_budget_each=True, load=4.0, store_tokens_s=1.0), "soonest-copying")
    assert slow == ClusterResult(**{**vars(alone), "route": "soonest-copying"})


@pytest.fixture
def trace_file(tmp_path):
    prompts = ([1, 2, 3], [1, 4, 5], [1, 2, 3], [6, 7], [1, 2, 3])
    rows = [
        {"timestamp": 1000 * at, "input_length": BLOCK * len(ids), "output_length": 0, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    file = tmp_path / "hand.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_replicas_are_compared_by_the_way_to_choose_between_them(invoke, trace_file) -> None:
    done = invoke("replicas", str(trace_file), "--replicas", "1,2", "--budget", "100%", "--json", "--requests", "4")
    assert done.exit_code == 0
    one, two = map(json.loads, done.stdout.splitlines())
    assert (one["replicas"], two["replicas"], one["requests"]) == (1, 2, 4)
    routes = ["soonest", "soonest-copying", "longest-prefix", "power-of-two", "round-robin", "bound"]
    assert [result["route"] for result in two["results"]] == routes
    assert len({result["reused_share"] for result in one["results"]}) == 1
    assert "hand.jsonl: 2 replicas of 1,536 tokens each" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "0"], "'0'"),
        (["--replicas", "4,x"], "'4,x'"),
        (["--route", "best"], "'best'"),
        (["--policy", "lru"], "--policy"),
        (["--load", "0%"], "'0%'"),
    ],
)
def test_wrong_options_for_replicas_are_refused(invoke, trace_file, words: list[str], said: str) -> None:
    done = invoke("replicas", str(trace_file), *words)
    assert done.exit_code == 2
    assert said in done.stderr
