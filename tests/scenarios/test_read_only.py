"""A cache over a tree that it only reads, whose files are deleted and damaged at any moment: it computes what it misses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bough.cache.disk import DiskBusy, ReadOnlyTree
from bough.cache.tree.state import Tier
from tests.crash.tree import Setup, serve
from tests.fakes import MODELS
from tests.scenarios.world import clear_idle_lanes

pytestmark = pytest.mark.usefixtures("lane_kind")

NUM_REQUESTS = 25


class ReadingWalk:
    """Random requests, evictions and losses, against one tree that an owner has left."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.setup, self.chance = Setup(seed), random.Random(f"reading {seed}")
        self.folder = folder
        owner = self.setup.open(folder)
        for _ in range(NUM_REQUESTS):
            serve(owner, self.setup.make_request(self.chance))
        owner.cache.upkeep.close()
        is_roomy = self.chance.random() < 0.5
        self.world = self.setup.open(folder, is_roomy=is_roomy, not_owner=DiskBusy(folder, 77))
        self.left = snapshot(folder)  # what must be there

    @property
    def pages(self) -> list[Path]:
        return sorted(file for file in (self.folder / "pages").rglob("*") if file.is_file())

    def step(self) -> None:
        steps = [self.ask, self.ask, self.ask, self.begin_and_lose, self.lose, self.damage, self.demote]
        self.chance.choice(steps)()
        self.world.check()

    def ask(self) -> None:
        serve(self.world, self.setup.make_request(self.chance))

    def begin_and_lose(self) -> None:
        """Files vanish while they are being read."""
        request = self.setup.make_request(self.chance)
        session = self.world.cache.begin(request.prompt, salt=request.salt)
        self.lose()
        session.finish_loading()
        self.world.sessions = [session]
        self.world.prefill(session)
        self.world.close(session)

    def lose(self) -> None:
        for file in self.chance.sample(self.pages, min(2, len(self.pages))):
            file.unlink()
            del self.left[file]

    def damage(self) -> None:
        if self.pages:
            file = self.chance.choice(self.pages)
            file.write_bytes(file.read_bytes()[: self.chance.randrange(200)])
            self.left[file] = (file.stat().st_size, file.stat().st_mtime_ns)

    def demote(self) -> None:
        clear_idle_lanes(self.world.cache)
        for tier in (Tier.DEVICE, Tier.HOST):
            for _ in range(self.chance.randrange(8)):
                self.world.cache.residency.evictor.evict_one(tier)


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_a_reader_computes_what_has_vanished_and_changes_nothing(tmp_path: Path, seed: int) -> None:
    walk = ReadingWalk(tmp_path / "tree", seed)
    disk = walk.world.cache.memory.disk
    assert disk is not None
    for number in range(400):  # file names are secret, and so which files are lost differs from run to run
        if number >= 40 and any(disk.counts.misses.values()):
            break
        walk.step()
    disk.check()
    walk.world.cache.upkeep.close()
    assert snapshot(walk.folder) == walk.left
    assert disk.counts.saved == 0 and disk.counts.loaded > 0 and sum(disk.counts.misses.values()) > 0


def test_clearing_forgets_what_is_known_and_says_that_the_disk_keeps_it(tmp_path: Path) -> None:
    walk = ReadingWalk(tmp_path / "tree", 0)

    with pytest.raises(ReadOnlyTree, match=r"nothing was deleted on disk.* in use by process 77"):
        walk.world.cache.upkeep.clear()

    walk.world.check()
    assert not walk.world.cache.forest.tries
    assert snapshot(walk.folder) == walk.left
    assert walk.world.stats()["disk_is_read_only"] is True


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file of a folder, with its size and time."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
