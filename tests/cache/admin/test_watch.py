"""Watching a tree: a mirror that applies what a watch tells is always equal to the tree."""

from __future__ import annotations

import random

import pytest

from bough.cache.admin.nodes import evict_node
from bough.cache.admin.watch import TreeChanges, TreePosition, TreeWatch, locate
from bough.cache.residency.census import NodeRecord
from bough.cache.steps import Steps, run_at_once
from bough.tokens import pack
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World

every_model = pytest.mark.parametrize("model", MODELS)


class Mirror:
    """What a reader knows of a tree: it applies one look after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch = TreeWatch(world.cache)
        self.roots: dict[str, dict[int, NodeRecord]] = {}

    def look(self, *salts: str) -> TreeChanges:
        changes = run_at_once(lambda: self.watch.look(salts))
        if changes.is_reset:
            self.roots = {}
        for name, root in changes.roots.items():
            nodes = self.roots.setdefault(name, {})
            for key, record in root.nodes.items():
                if record is None:
                    nodes.pop(key, None)
                else:
                    nodes[key] = record
        self.roots = {name: nodes for name, nodes in self.roots.items() if nodes}
        return changes

    def check(self) -> None:
        forest = self.world.cache.forest
        expected = {
            salt: {node.key: NodeRecord.of(node) for node in trie.walk() if not node.is_root}
            for salt, trie in forest.tries.items()
        }
        assert self.roots == {salt: nodes for salt, nodes in expected.items() if nodes}


def test_the_first_look_tells_everything_and_the_next_one_what_has_changed() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([7, 8])
    mirror = Mirror(world)

    first, second = mirror.look(), mirror.look()
    world.run([1, 2, 3, 9])
    third = mirror.look()

    assert first.is_reset and len(first.roots[""].nodes) == 2
    assert not second.is_reset and not second.roots
    assert len(third.roots[""].nodes) == 3  # the new head, the tail that is left, and the new branch
    mirror.check()


def test_a_leaf_keeps_its_key_when_its_edge_is_split_and_when_it_grows() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    mirror = Mirror(world)
    mirror.look()
    (leaf,) = mirror.roots[""]

    world.run([1, 2, 9])
    world.run([1, 2, 3, 4, 5, 6])
    mirror.look()

    assert mirror.roots[""][leaf].end == 6
    assert mirror.roots[""][leaf].parent not in (None, leaf)


@every_model
def test_a_mirror_follows_a_random_walk(model: str) -> None:
    world = World(MODELS[model], 2, num_lanes=2, budget_bytes=4_000, disk=FakeDisk(2))
    mirror, rng = Mirror(world), random.Random(7)
    for _ in range(50):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        world.run(prompt, [5] * rng.randrange(3), salt=rng.choice(["", "other"]))
        if rng.random() < 0.1:
            nodes = [(name, key) for name, root in mirror.roots.items() for key in root]
            name, key = rng.choice(nodes) if nodes else ("", 0)
            if key in {node.key for node in world.cache.forest.find(name).walk()}:
                run_at_once(lambda name=name, key=key: evict_node(world.cache, name, key))
        if rng.random() < 0.05:
            world.cache.upkeep.clear(rng.choice(["", "other", None]))
        if rng.random() < 0.5:
            mirror.look()
            mirror.check()
        world.check()


def test_nothing_is_noted_while_nobody_watches() -> None:
    world = World(MODELS["full"], 2)
    census = world.cache.memory.census
    mirror, other = Mirror(world), Mirror(world)
    mirror.look()
    other.look()
    mirror.watch.close()

    world.run([1, 2, 3, 4])
    other.look()
    other.check()
    assert len(census.watchers) == 1
    other.watch.close()
    world.run([1, 2, 9])
    Mirror(world).look()

    assert [watcher.is_over for watcher in census.watchers] == [False]


def test_a_watch_that_is_closed_while_it_looks_leaves_nothing_behind() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([7, 8])
    closed, mirror = Mirror(world), Mirror(world)
    steps = closed.watch.look()

    closed.watch.close()  # as another thread may, before the first step
    run_at_once(lambda: steps)
    world.run([1, 2, 9])
    mirror.look()

    assert len(world.cache.memory.census.watchers) == 1
    mirror.check()


def test_a_look_that_was_given_up_loses_nothing() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([7, 8])
    mirror = Mirror(world)

    _begin_look(mirror).close()
    assert mirror.look().is_reset
    world.run([1, 2, 9])
    _begin_look(mirror).close()
    mirror.look()

    mirror.check()


def _begin_look(mirror: Mirror) -> Steps[TreeChanges]:
    """A look that has taken its first step: each node has something new to tell."""
    trie = mirror.world.cache.forest.find("")
    for node in trie.walk():
        trie.memory.note(node)
    steps = mirror.watch.look()
    next(steps)
    return steps


def test_a_root_from_disk_gets_the_name_of_its_salt_when_a_reader_names_it() -> None:
    disk = FakeDisk(2)
    world = World(MODELS["full"], 2, disk=disk)
    world.run([1, 2, 3, 4], salt="alice")
    world.cache.upkeep.flush()
    mirror = Mirror(World(MODELS["full"], 2, disk=disk.restarted()))

    unnamed = mirror.look()
    named = mirror.look("alice")

    assert [name.startswith("(on disk ") for name in unnamed.roots] == [True]
    assert named.is_reset and list(named.roots) == ["alice"]


def test_prompts_are_located_in_the_tree_of_their_salt() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([1, 2, 9], salt="other")
    mirror = Mirror(world)
    mirror.look()
    (key,) = mirror.roots[""]

    found = locate(world.cache, [(pack([1, 2, 9]), ""), (pack([5]), ""), (pack([1]), "nobody")])

    assert found == [TreePosition(key, 2), TreePosition(None, 0), TreePosition(None, 0)]
