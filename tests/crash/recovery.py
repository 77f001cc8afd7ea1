"""What must hold of a folder after a crash, whatever was going on."""

from __future__ import annotations

import random
from pathlib import Path

from bough.cache.admin.trees import verify_tree
from bough.cache.prefix_cache import PrefixCache
from bough.tokens import unpack
from tests.crash.tree import SALTS, Promise, Promises, Setup, depth_in_tree
from tests.scenarios.world import World


def recover(setup: Setup, folder: Path, promises: Promises, chance: random.Random) -> int:
    """Assert that a folder verifies clean, and that a cache over it is whole, right, and has what was promised.

    Verifying closes the index, so that the next start finds it as after a clean end: it comes first only half the time, and
    not before there is a tree to verify: one whose making was cut short is made anew by the next start. Returns how many
    tokens were reused, so that tests can say that there was something to lose.
    """
    if promises.num_flushes and chance.random() < 0.5:
        verify(folder)
    world = setup.open(folder, is_roomy=True)
    world.check()
    kept = promises.promised if setup.is_ample else []
    reused_tokens = _check_promises(world, kept, chance) + _read_everything(world)
    disk = world.cache.memory.disk
    assert disk is not None and disk.counts.set_aside == 0
    assert sum(disk.counts.misses.values()) == world.cache.residency.loader.counts.misses == 0
    assert disk.flush()
    disk.check()
    world.cache.upkeep.close()
    verify(folder)
    return reused_tokens


def verify(folder: Path) -> int:
    """Assert that every file of a tree is what the index says; returns how many there are."""
    found = verify_tree(folder)
    assert found.problems == (), found.problems
    return found.num_files


def _check_promises(world: World, promised: list[Promise], chance: random.Random) -> int:
    """Everything promised is there; some of it is asked for."""
    for promise in promised:
        assert depth_in_tree(world, promise.salt, promise.tokens) >= promise.depth, f"lost {promise}"
    chosen = chance.sample(promised, min(3, len(promised)))
    return sum(_ask(world, promise.salt, promise.tokens) for promise in chosen)


def _read_everything(world: World) -> int:
    """Ask for every path of the tree, so that every file is read and compared with its tokens."""
    return sum(_ask(world, salt, tokens) for salt in set(SALTS) for tokens in paths(world.cache, salt))


def _ask(world: World, salt: str, tokens: list[int]) -> int:
    """Serve a request that goes on after these tokens, leaving no trace; what the tree has of them must be reused."""
    depth = depth_in_tree(world, salt, tokens)
    session = world.cache.begin([*tokens, 61], salt=salt, max_new_tokens=1, keep_state=False)
    world.sessions = [session]
    session.finish_loading()
    world.prefill(session)
    world.decode(session, [62])
    world.close(session)
    assert session.cached >= depth
    return session.cached


def paths(cache: PrefixCache, salt: str) -> list[list[int]]:
    """The tokens of every path of a salt's tree."""
    leaves = [node for node in cache.forest.find(salt).walk() if node.is_leaf and not node.is_root]
    return [[token for node in leaf.path() for token in unpack(node.edge)] for leaf in leaves]
