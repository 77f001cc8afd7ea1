"""Expiry: what was not used for the time to live goes, a bounded part of the tree at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from bough.cache.residency.memory import SaltTrie
from bough.cache.residency.rates import Clock
from bough.cache.residency.saving import EXPIRE_EVERY_S, EXPIRE_NODES, EXPIRE_REMOVALS, Expiry
from bough.cache.tree.node import Node
from tests.fakes import MODELS
from tests.scenarios.world import World


class Sweeps:
    """A tree of one root with many branches of three nodes, which notes the nodes that are looked at."""

    def __init__(self, num_branches: int) -> None:
        self.world = World(MODELS["full"], 2)
        self.now = 0.0
        cache = self.world.cache
        self.trie: SaltTrie = cache.forest.open("")
        self.expiry = Expiry(cache.forest, cache.residency.evictor, Clock(lambda: self.now), ttl_s=100.0)
        self.seen: list[Node] = []
        self.leaves = [self._grow(branch) for branch in range(num_branches)]
        walk = self.trie.walk

        def noting_walk() -> Iterator[Node]:
            for node in walk():
                self.seen.append(node)
                yield node

        self.trie.walk = noting_walk  # type: ignore[method-assign]

    def _grow(self, branch: int) -> Node:
        node = self.trie.root
        for token in (branch, 1, 2):
            node = self.trie.append(node, [token])
        return node

    def sweep(self) -> list[int]:
        """Call until nothing is left to look at; returns how many nodes each call has looked at."""
        looks, has_more = [], True
        while has_more:
            before = len(self.seen)
            has_more = self.expiry.expire()
            looks.append(len(self.seen) - before)
        return looks


def test_each_call_looks_at_a_bounded_number_of_nodes_and_all_are_looked_at() -> None:
    sweeps = Sweeps(num_branches=1000)

    looks = sweeps.sweep()

    assert sum(looks) == 3001 and max(looks) == EXPIRE_NODES
    assert sweeps.sweep() == [0]  # until the next is due
    sweeps.now += EXPIRE_EVERY_S
    assert sum(sweeps.sweep()) == 3001


def test_one_sweep_removes_all_that_is_too_old_few_at_a_time_with_its_parents() -> None:
    sweeps = Sweeps(num_branches=200)
    sweeps.leaves[50].touch(90.0)
    sweeps.now, left = 150.0, [600]

    while sweeps.expiry.expire():
        left.append(sweeps.trie.memory.census.counts.nodes)

    assert [node for node in sweeps.world.cache.forest.nodes() if node.is_leaf] == [sweeps.leaves[50]]
    assert max(before - after for before, after in pairwise(left)) <= EXPIRE_REMOVALS + 3


def test_a_sweep_goes_on_when_the_tree_changes_on_its_way() -> None:
    sweeps = Sweeps(num_branches=1000)
    sweeps.expiry.expire()
    for leaf in sweeps.leaves[::2]:
        sweeps.world.cache.residency.evictor.remove(sweeps.trie, leaf)
    for leaf in sweeps.leaves[1::2]:
        assert leaf.parent is not None
        sweeps.trie.merge(leaf.parent)
    sweeps.now = 150.0

    sweeps.sweep()
    sweeps.now += EXPIRE_EVERY_S
    sweeps.sweep()

    assert not sweeps.world.cache.forest.tries
    sweeps.world.check()
