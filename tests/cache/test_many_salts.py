"""Thousands of tenants: what they leave behind is bounded by what is kept, not by how many there were."""

from __future__ import annotations

import gc
import weakref

from bough.cache.trie import Trie
from tests.fakes import MODELS
from tests.scenarios.world import World

SMALL_BYTES = 400  # lanes and tree together: a few prompts


def visit(world: World, salt: str) -> weakref.ref[Trie]:
    """Two prompts that part, under a salt of their own."""
    world.run([1, 2, 3, 4, 5, 6], salt=salt)
    found = weakref.ref(world.cache.tries[salt])
    world.run([1, 2, 3, 7, 8, 9], salt=salt)
    return found


def test_a_salt_whose_state_was_evicted_leaves_nothing_behind_without_a_disk() -> None:
    world = World(MODELS["full"], 2, budget_bytes=SMALL_BYTES)

    tries = [visit(world, f"salt {number}") for number in range(100)]

    gc.collect()
    assert len(world.cache.tries) < 10
    assert sum(trie() is not None for trie in tries) < 50  # the heap's stale entries know a few that are gone
