"""Thousands of tenants: what they leave behind is bounded by what is kept, not by how many there were."""

from __future__ import annotations

import gc
import weakref

import pytest

from bough.cache.residency import evictor
from bough.cache.tree.node import Node
from bough.cache.tree.state import Tier
from bough.cache.tree.trie import Trie
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World

SMALL_BYTES = 400  # lanes and tree together: a few prompts


def visit(world: World, salt: str) -> weakref.ref[Trie]:
    """Two prompts that part, under a salt of their own."""
    world.run([1, 2, 3, 4, 5, 6], salt=salt)
    found = weakref.ref(world.cache.forest.tries[salt])
    world.run([1, 2, 3, 7, 8, 9], salt=salt)
    return found


def test_a_salt_whose_state_was_evicted_leaves_nothing_behind_without_a_disk() -> None:
    world = World(MODELS["full"], 2, budget_bytes=SMALL_BYTES)

    tries = [visit(world, f"salt {number}") for number in range(100)]

    gc.collect()
    assert len(world.cache.forest.tries) < 10
    assert sum(trie() is not None for trie in tries) < 50  # the heap's stale entries know a few that are gone


class QuickWorld(World):
    """A world that is checked at the end only."""

    def check(self) -> None:
        pass


def test_the_order_of_eviction_keeps_few_stale_entries_for_each_salt() -> None:
    world = QuickWorld(MODELS["full"], 2, salt_share=0.5, budget_bytes=1 << 20)
    for _ in range(20):
        for number in range(20):
            world.run([1, 2, 3, 4], salt=f"salt {number}")

    num_nodes = len(world.cache.forest.tries)
    assert num_nodes == 20
    assert len(world.cache.residency.evictor.order) <= 15 * num_nodes  # in the heap of all and in its salt's own
    World.check(world)


def count_stamps(monkeypatch: pytest.MonkeyPatch, num_salts: int) -> int:
    """How often entries are compared with their nodes while kept leaves go, whose parents cannot go before them."""
    disk = FakeDisk(page_tokens=2)
    world = QuickWorld(MODELS["full"], 2, budget_bytes=SMALL_BYTES, disk=disk)
    for number in range(num_salts):
        world.run([1, 2, 3, 4], salt=f"salt {number}", keep=True)
        world.run([1, 2, 5, 6], salt=f"salt {number}", keep=True)
    disk.work()
    counted, stamp = [0], Node.stamp

    def read(node: Node) -> int:
        counted[0] += 1
        found: int = stamp.__get__(node)  # type: ignore[attr-defined]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Node, "stamp", property(read, stamp.__set__))  # type: ignore[attr-defined]
        for _ in range(10):
            assert world.cache.residency.evictor.evict_one(Tier.DISK)
    World.check(world)
    return counted[0]


def test_candidates_that_cannot_go_cost_no_more_each_the_more_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor, "MAX_REFUSED", 8)

    some, more = count_stamps(monkeypatch, 30), count_stamps(monkeypatch, 120)

    assert more < 6 * some


class CountingDisk(FakeDisk):
    """A disk that counts the tokens of the paths that were traced on it."""

    num_traced = 0

    def digests(self, root: bytes, tokens: bytes) -> list[bytes]:
        self.num_traced += len(tokens) // 4
        return super().digests(root, tokens)


@pytest.mark.parametrize("model", MODELS)
def test_flushing_what_is_on_disk_already_traces_no_path(model: str) -> None:
    disk = CountingDisk(page_tokens=2)
    world = World(MODELS[model], 2, disk=disk)
    for number in range(10):
        visit(world, f"salt {number}")
    assert world.cache.upkeep.flush()

    before = disk.num_traced
    assert world.cache.upkeep.flush()

    assert disk.num_traced == before


def test_flushing_one_salt_leaves_the_others_to_the_writer() -> None:
    disk = CountingDisk(page_tokens=2)
    world = World(MODELS["full"], 2, disk=disk)
    for salt in ("ours", "theirs"):
        disk.is_full = True  # nothing is taken while the requests run
        visit(world, salt)
    disk.is_full = False

    before = disk.num_traced
    assert world.cache.upkeep.flush("ours")

    assert 0 < disk.num_traced - before <= 15  # the three nodes of one salt, each with its path
    assert {address.root for address in disk.platter.files} == {disk.root("ours")}
    assert world.cache.upkeep.flush("nobody")
