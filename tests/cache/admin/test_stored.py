"""A tree on disk without its model: what is seen of it is what a process with the model sees when it has opened it."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.trees import open_stored
from bough.cache.admin.view import look_up, view_tree
from bough.cache.disk import DiskError
from bough.cache.disk.index import INDEX
from bough.cache.prefix_cache import PrefixCache
from bough.tokens import pack
from tests.crash.tree import SALTS, Setup, serve
from tests.fakes import MODELS


def decode(ids: Any) -> str:
    return " ".join(map(str, ids))


def look(cache: PrefixCache, setup: Setup) -> list[Any]:
    """All that is told of a tree, but for how long ago something was used: the clocks of the tests begin anew."""
    chance = random.Random("asked")
    requests = [setup.make_request(chance) for _ in range(20)]
    views = [view_tree(cache, 0.0, decode, salt).as_dict() for salt in (None, *SALTS)]
    prompts = [(pack(request.prompt), request.salt) for request in requests]
    explained = [look_up(cache, prompt, salt).explain(prompt, decode) for prompt, salt in prompts]
    return [_without_time(views), explained]


def _without_time(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _without_time(value) for name, value in plain.items() if name != "idle_s"}
    return [_without_time(each) for each in plain] if isinstance(plain, list) else plain


def make_tree(folder: Path, setup: Setup) -> None:
    chance = random.Random(setup.seed)
    world = setup.open(folder)
    for _ in range(12):
        serve(world, setup.make_request(chance))
    world.cache.upkeep.close()


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_a_stored_tree_is_what_its_model_would_find(tmp_path: Path, seed: int) -> None:
    setup, folder = Setup(seed), tmp_path / "tree"
    make_tree(folder, setup)

    with open_stored(folder, "crash", 4) as stored:
        stored.check()
        seen = look(stored, setup)

    world = setup.open(folder)
    world.cache.lanes.slots.clear()  # what idle lanes hold is no part of the tree
    assert look(world.cache, setup) == seen and seen[0][0]


def test_a_stored_tree_is_seen_while_another_process_uses_it(tmp_path: Path) -> None:
    setup, folder = Setup(0), tmp_path / "tree"
    make_tree(folder, setup)
    world = setup.open(folder)

    with open_stored(folder, "crash", 4) as stored:
        assert stored.forest.tries
    world.cache.upkeep.close()


def test_a_tree_whose_index_does_not_tell_its_groups_is_seen_too(tmp_path: Path) -> None:
    setup, folder = Setup(list(MODELS).index("full+recurrent")), tmp_path / "tree"
    make_tree(folder, setup)
    with open_stored(folder, "crash", 4) as stored:
        told = look(stored, setup)
    with sqlite3.connect(folder / INDEX) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'groups'")
    connection.close()

    with open_stored(folder, "crash", 4) as stored:
        assert look(stored, setup) == told


def test_a_tree_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"nonsense" * 1000)
    with pytest.raises(DiskError, match=str(tmp_path)), open_stored(tmp_path, "crash", 4):
        pass
