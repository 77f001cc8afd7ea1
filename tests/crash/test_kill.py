"""Killed with SIGKILL at random moments, 70 times (200 with --slow): the next start is clean and keeps what was flushed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.nursery import Nursery, random_moment
from tests.crash.recovery import recover
from tests.crash.seeds import how_often, seeds
from tests.crash.tree import Promises, Setup
from tests.crash.worker import Job

NUM_TREES, NUM_KILLS = 20, 10


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("seed", seeds(NUM_TREES))
def test_a_tree_that_is_killed_again_and_again_keeps_what_was_flushed(
    tmp_path: Path, nursery: Nursery, seed: int, request: pytest.FixtureRequest
) -> None:
    """Each life goes on from what the last one left; what is examined after each is a copy, so that nothing helps it."""
    setup, chance = Setup(seed), random.Random(seed)
    folder, journal = tmp_path / "trees" / "tree", tmp_path / "journal"
    promises = Promises()
    reused_tokens = 0
    for life in range(how_often(request, NUM_KILLS)):
        journal.unlink(missing_ok=True)
        moment = random_moment(chance) if life else ("flushed", 0.0)
        nursery.kill_after(Job(str(folder), str(journal), seed, life), *moment)
        hear(promises, journal)
        examined = tmp_path / f"examined-{life}" / "tree"
        if folder.exists():
            shutil.copytree(folder, examined)
        reused_tokens += recover(setup, examined, promises, chance)
        shutil.rmtree(examined)
    assert reused_tokens > 0


def hear(promises: Promises, journal: Path) -> None:
    """Take up what a life has promised; it may have been killed in the middle of a line."""
    for line in journal.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            promises.hear(line)
