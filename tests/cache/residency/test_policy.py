"""Which bytes go first, and what an eviction costs in looks at the tree."""

from __future__ import annotations

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltForest
from bough.cache.residency.policy import (
    LRU2,
    WHOLE_NODES,
    EvictionClass,
    classify,
    leaf_lru,
    leaf_lru2,
    redundant_point,
    tail_start,
)
from bough.cache.tree.forest import Forest
from bough.cache.tree.node import Node, Pin, Point, Reason
from bough.cache.tree.trie import NoMemory, Trie
from tests.fakes import MODELS, FakeEngine
from tests.scenarios.world import World


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
    node.pins.add(Pin(node, 9))
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
    memory = Memory(FakeEngine())
    forest: SaltForest = Forest(memory, 4)
    evictor, trie = Evictor(memory, forest, 4), forest.open("")
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
