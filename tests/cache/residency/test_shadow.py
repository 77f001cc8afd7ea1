"""Shadows know which policy would have served more, and the tree follows the winner."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from bough.cache.residency.policy import LRU, LRU2, Policy
from bough.cache.residency.shadow import NEVER, Duel, Lru2Shadow, LruShadow, page_ids
from bough.cache.tree.tokens import pack
from tests.fakes import MODELS
from tests.scenarios.world import World

PAGES = [bytes([number]) for number in range(10)]


def test_only_whole_pages_have_ids_and_equal_ids_mean_equal_prefixes() -> None:
    first = page_ids(pack([1, 2, 3, 4, 5]), 2)
    second = page_ids(pack([1, 2, 9, 4]), 2)

    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert len({*first, *second}) == 3  # [3, 4] and [9, 4] differ, and so do equal pages after them


def test_equal_tokens_under_two_salts_have_different_ids() -> None:
    assert not {*page_ids(pack([1, 2]), 1, "a")} & {*page_ids(pack([1, 2]), 1, "b")}


def test_the_lru_shadow_lets_the_deepest_page_of_the_oldest_path_go() -> None:
    shadow = LruShadow()
    shadow.use(PAGES[:3], 1.0, 5)
    shadow.use(PAGES[3:6], 2.0, 5)
    assert set(shadow.held) == {*PAGES[:2], *PAGES[3:6]}


def test_the_lru2_shadow_lets_go_first_what_never_came_back() -> None:
    shadow = Lru2Shadow()
    for now in (1.0, 2.0):
        shadow.use(PAGES[:2], now, 4)
    shadow.use(PAGES[2:4], 3.0, 4)
    shadow.use(PAGES[4:5], 4.0, 4)
    assert set(shadow.held) == {*PAGES[:3], PAGES[4]}


def test_a_second_note_of_the_same_moment_is_no_return() -> None:
    shadow = Lru2Shadow()
    for _ in range(2):
        shadow.use(PAGES[:2], 1.0, 3)
    shadow.use(PAGES[2:4], 2.0, 3)
    assert set(shadow.held) == {PAGES[0], *PAGES[2:4]}


def test_the_lru2_shadow_remembers_last_uses_of_twice_as_many_pages_as_it_holds() -> None:
    shadow = Lru2Shadow()
    for number, page in enumerate(PAGES[:4]):
        shadow.use([page], float(number), 1)
    assert [shadow.last_used(page) for page in PAGES[:4]] == [NEVER, 1.0, 2.0, 3.0]

    shadow.use(PAGES[1:2], 9.0, 1)
    shadow.use(PAGES[5:6], 10.0, 1)
    assert PAGES[1] in shadow.held  # it came back, and the newcomer did not


def scan(num_requests: int) -> list[list[int]]:
    """Three chats that come back every 15 requests, among prompts that nobody asks again."""
    requests = []
    for number in range(num_requests):
        chat = number // 5 % 3 if number % 5 == 0 else 100 + number
        requests.append([1000 * chat + step for step in range(4)])
    return requests


def bursts(num_requests: int) -> list[list[int]]:
    """Chats of eight turns, two at a time, which then end for good."""
    requests = []
    for number in range(num_requests):
        chat, turn = 2 * (number // 16) + number % 2, number % 16 // 2
        requests.append([1000 * chat + step for step in range(2 + turn)])
    return requests


def winner(requests: Sequence[Sequence[int]], capacity: int) -> Policy:
    duel = Duel(page_tokens=1)
    for now, tokens in enumerate(requests):
        duel.note(pack(tokens), pack(tokens), "", float(now), capacity)
    return duel.policy


def test_recency_is_in_force_at_first() -> None:
    assert Duel(page_tokens=256).policy is LRU


@pytest.mark.parametrize(("workload", "policy"), [(scan, LRU2), (bursts, LRU)])
def test_the_duel_finds_the_policy_that_suits(workload: Callable[[int], list[list[int]]], policy: Policy) -> None:
    assert winner(workload(300), capacity=30) is policy


def test_the_duel_changes_its_mind_when_the_requests_do() -> None:
    assert winner(scan(300) + bursts(600), capacity=30) is LRU


def serve(world: World, requests: Sequence[Sequence[int]]) -> int:
    return sum(world.run(tokens).cached for tokens in requests)


def bounded(num_tokens: int) -> World:
    """A world with room for so many tokens in the tree beside a lane of ten."""
    return World(MODELS["full"], 1, budget_bytes=8 * (num_tokens + 10))


def test_the_cache_follows_the_winner_and_keeps_what_comes_back() -> None:
    w = bounded(30)
    serve(w, scan(300))
    assert w.cache.finisher.duel.policy is LRU2
    assert [w.known([1000 * chat + step for step in range(4)]) for chat in range(3)] == [4, 4, 4]


def test_the_cache_stays_with_recency_where_that_serves_more() -> None:
    w = bounded(30)
    serve(w, bursts(200))
    assert w.cache.finisher.duel.policy is LRU


def test_the_same_requests_twice_leave_the_same_tree() -> None:
    chance = random.Random(3)
    requests = [[chance.randrange(3) for _ in range(chance.randrange(1, 9))] for _ in range(200)]
    first, second = bounded(12), bounded(12)

    assert serve(first, requests) == serve(second, requests)
    assert first.stats() == second.stats()


def test_rows_that_come_back_after_they_were_let_go_count_as_returned() -> None:
    w = bounded(8)
    w.run([1, 2, 3, 4])
    while w.cache.residency.evictor.evict_one():
        pass
    assert w.known([1, 2, 3, 4]) == 0

    w.run([1, 2, 3, 4])
    w.run([20, 21])

    returned, new = (w.cache.forest.tries[""].match(tokens).node for tokens in ([1, 2, 3, 4], [20, 21]))
    assert returned.previous_used > NEVER
    assert new.previous_used == NEVER


def test_a_new_branch_of_a_known_conversation_has_not_come_back() -> None:
    w = World(MODELS["full"], 1)
    w.run([1, 2, 3])
    w.run([1, 2, 8])
    found = w.cache.forest.tries[""].match([1, 2, 8])
    assert found.path[0].previous_used > NEVER
    assert found.node.previous_used == NEVER


def test_clearing_the_cache_forgets_the_shadows_too() -> None:
    w = bounded(30)
    serve(w, scan(300))
    w.cache.clear()
    assert w.cache.finisher.duel.policy is LRU
