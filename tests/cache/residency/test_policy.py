"""Which bytes go first, what an eviction costs in looks at the tree, and which of two policies would have served more."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltForest
from bough.cache.residency.policy import (
    LRU,
    LRU2,
    NEVER,
    WHOLE_NODES,
    Duel,
    EvictionClass,
    Lru2Shadow,
    LruShadow,
    Policy,
    classify,
    leaf_lru,
    leaf_lru2,
    page_ids,
    redundant_point,
    tail_start,
)
from bough.cache.tree.forest import Forest
from bough.cache.tree.node import Hold, Node, Point, Reason
from bough.cache.tree.trie import NoMemory, Trie
from bough.tokens import pack
from tests.fakes import MODELS, FakeEngine
from tests.scenarios.world import World

PAGES = [bytes([number]) for number in range(10)]


def leaf(num_tokens: int = 10, start: int = 0) -> Node:
    trie = Trie(NoMemory())
    parent = trie.append(trie.root, list(range(start))) if start else trie.root
    return trie.append(parent, list(range(100, 100 + num_tokens)))


def test_a_tail_reaches_back_to_the_last_page_border() -> None:
    assert tail_start(leaf(10), 4, needs_points=False, take_kept=False) == 8
    assert tail_start(leaf(8), 4, needs_points=False, take_kept=False) == 4
    assert tail_start(leaf(3), 4, needs_points=False, take_kept=False) == 0


def test_a_tail_reaches_back_to_a_restore_point_where_the_model_needs_them() -> None:
    node = leaf(10)
    node.points = {5: Point(5, Reason.BRANCH), 9: Point(9, Reason.END)}
    assert tail_start(node, 4, needs_points=True, take_kept=False) == 5


def test_what_a_busy_lane_stands_on_stays() -> None:
    node = leaf(10)
    node.holds.add(Hold(node, 9))
    assert tail_start(node, 4, needs_points=False, take_kept=True) == 9


def test_kept_points_stay_until_they_are_meant() -> None:
    node = leaf(10)
    node.points = {10: Point(10, Reason.END, kept=True)}
    assert classify(node, 4, needs_points=False) is EvictionClass.KEPT_TAIL
    assert tail_start(node, 4, needs_points=False, take_kept=True) == 8


def test_redundant_points_go_first_and_system_ends_and_branch_points_never_count_as_such() -> None:
    node = leaf(10)
    node.points = {
        2: Point(2, Reason.SYSTEM, superseded=True),
        4: Point(4, Reason.BRANCH, superseded=True),
        6: Point(6, Reason.MESSAGE),
        8: Point(8, Reason.PROMPT_END),
    }
    found = redundant_point(node)
    assert found is not None and found.offset == 6
    del node.points[6]
    assert redundant_point(node) is None
    node.points[8].superseded = True
    assert classify(node, 4, needs_points=True) is EvictionClass.REDUNDANT_POINT


def test_least_recently_used_goes_first_then_the_deepest_then_the_largest() -> None:
    old, new = leaf(4), leaf(4)
    old.last_used, new.last_used = 1.0, 2.0
    assert leaf_lru(old) < leaf_lru(new)
    new.last_used = 1.0
    assert leaf_lru(leaf(4, start=4)) < leaf_lru(leaf(4, start=2))


def test_under_lru2_the_use_before_the_last_decides_and_what_never_came_back_goes_first() -> None:
    new, slow, quick = leaf(4), leaf(4), leaf(4)
    new.last_used = 9.0
    slow.last_used, slow.previous_used = 8.0, 1.0
    quick.last_used, quick.previous_used = 7.0, 6.0
    assert leaf_lru2(new) < leaf_lru2(slow) < leaf_lru2(quick)


def test_another_policy_sorts_what_is_there_already() -> None:
    w = World(MODELS["full"], 4)
    for prompt in ([1, 2], [1, 2], [5, 6]):
        w.run(prompt)

    w.cache.residency.evictor.order.use_policy(LRU2)
    w.cache.residency.evictor.evict_one()

    assert w.known([1, 2]) == 2
    assert w.known([5, 6]) == 0


def test_a_policy_of_whole_nodes_takes_a_leaf_at_once_and_spares_what_is_pinned() -> None:
    w = World(MODELS["full"], 4)
    w.cache.residency.evictor.order.use_policy(WHOLE_NODES)
    w.run(list(range(1, 15)))
    session = w.begin([1, 2, 3, 99])

    assert w.cache.residency.evictor.evict_one()
    assert w.known(list(range(1, 15))) == 3
    w.close(session)
    assert w.cache.residency.evictor.evict_one()
    assert w.known([1]) == 0


def test_the_heap_forgets_stale_entries() -> None:
    memory = Memory(FakeEngine(), page_tokens=4)
    forest: SaltForest = Forest(memory, 4)
    evictor, trie = Evictor(memory, forest), forest.open("")
    node = trie.append(trie.root, list(range(8)))
    for _ in range(10_000):
        evictor.offer(trie, node)
    assert len(evictor.order) < 200


def test_a_leaf_goes_page_by_page_not_as_a_whole() -> None:
    w = World(MODELS["full"], 4)
    w.run(list(range(1, 15)))
    known = []
    while w.cache.residency.evictor.evict_one():
        w.check()
        known.append(w.known(list(range(1, 15))))
    assert known == [12, 8, 4, 0]


def test_a_parent_goes_only_after_its_last_child() -> None:
    w = World(MODELS["full"], 4)
    w.run([1, 2, 3, 4, 5, 6])
    w.run([1, 2, 3, 4, 7, 8])
    w.cache.residency.evictor.evict_one()
    assert w.known([1, 2, 3, 4, 5, 6]) == 4
    assert w.known([1, 2, 3, 4, 7, 8]) == 6


def test_rows_that_no_restore_point_needs_go_together_up_through_the_parents() -> None:
    w = World(MODELS["full+recurrent"], 4)
    w.run([1, 2, 3, 4, 5, 6, 7, 8])
    trie = w.cache.forest.tries[""]
    (node,) = trie.root.children.values()
    trie.split(node, 3)
    for point in list(node.points.values()):
        trie.drop_point(node, point)
    w.cache.residency.evictor.offer(trie, node)

    w.cache.residency.evictor.evict_one()

    assert trie.root.is_leaf


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
    w.cache.upkeep.clear()
    assert w.cache.finisher.duel.policy is LRU
