"""An import comes into a tree that is in use: nothing in memory goes, and what was missing is there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.cache.admin.archive import ImportResult, export_tree, import_tree
from bough.cache.disk import Disk
from bough.cache.tree.address import DiskFile, PointRecord
from bough.cache.tree.state import Tier
from bough.errors import QueueFull
from bough.types import Boundary, Mark
from tests.cache.admin.donor import Imported, bring
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_interleaved import Traffic, open_disk
from tests.scenarios.test_tiers import demote_all, tiers
from tests.scenarios.world import World

LONG = list(range(1, 23))
BRANCH = [*LONG[:9], *range(40, 52)]
every_model = pytest.mark.parametrize("model", MODELS)
with_rows = pytest.mark.parametrize("model", [model for model in MODELS if "full" in model])


def bring_in(world: World, disk: FakeDisk, model: str, chats: list[list[int]], salt: str = "") -> None:
    imported = bring(disk, model, chats, salt, random.Random(0), 0.0)
    world.cache.attach(salt, imported.files, imported.points)
    world.check()


@every_model
def test_what_is_imported_into_an_empty_tree_is_reused(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)

    bring_in(world, disk, model, [LONG, BRANCH], "mine")

    for chat in (LONG, BRANCH):
        assert world.cache.count_reusable([*chat, 63], "mine") == len(chat)
        assert world.run([*chat, 63], salt="mine").cached == len(chat)
    assert world.known(LONG) == 0


@every_model
def test_what_is_in_memory_stays_there_and_requests_go_on(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, num_lanes=2, disk=disk)
    world.run(LONG)
    busy = world.begin([*LONG[:15], 60, 61, 62])
    before = world.cache.memory.tree_bytes

    bring_in(world, disk, model, [BRANCH, [*LONG, 30, 31], LONG[:15]])

    assert world.cache.memory.tree_bytes == before > 0 and tiers(world)[Tier.DISK] > 0
    assert world.known(BRANCH) == len(BRANCH) and world.known([*LONG, 30, 31]) == len(LONG) + 2
    world.prefill(busy)
    world.close(busy)
    assert world.run([*BRANCH, 63]).cached == len(BRANCH)


@every_model
def test_what_an_archive_has_twice_is_taken_once(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)
    imported = bring(disk, model, [LONG, BRANCH], "", random.Random(0), 0.0)

    world.cache.attach("", [*imported.files, *imported.files], [*imported.points, *imported.points])

    world.check()
    for chat in (LONG, BRANCH):
        assert world.run([*chat, 63]).cached == len(chat)


def test_an_import_fills_holes() -> None:
    disk = FakeDisk(4)
    world = World(MODELS["full"], 4, disk=disk)
    world.run(LONG)
    demote_all(world)
    for address in [address for address in disk.platter.files if address.start == 4]:
        del disk.platter.files[address]
    assert world.begin([*LONG, 63]).cached == 4  # the page is lost
    world.sessions[0].close()
    for slot in world.cache.lanes.slots:
        slot.clear()
    trie = world.cache.forest.tries[""]
    while (node := trie.match(LONG).node).end > len(LONG):
        trie.trim(node, len(LONG))
    assert node.has_holes

    bring_in(world, disk, "full", [LONG])

    assert not trie.match(LONG).node.has_holes
    assert world.cache.count_reusable([*LONG, 63]) == len(LONG)


@with_rows
def test_files_that_find_no_place_are_dropped(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)
    imported = bring(disk, model, [LONG], "", random.Random(0), 0.0)
    for file in imported.files:
        if file.address.end == 8:
            disk.live.pop(file.address)  # it was cleared meanwhile

    world.cache.attach("", imported.files, imported.points)
    world.check()

    assert world.known(LONG) == 4
    assert all(address.end <= 4 for address in disk.live) and all(file.num_users for file in disk.live.values())
    assert all(address.end <= 4 for address in disk.platter.points)


@pytest.mark.parametrize("model", ["full", "recurrent", "window+recurrent+full"])
def test_an_import_that_the_tree_cannot_take_leaves_no_file(model: str, tmp_path: Path) -> None:
    with open_disk(tmp_path / "one") as source, open_disk(tmp_path / "other") as disk:
        origin, world = World(MODELS[model], 4, disk=source), World(MODELS[model], 4, disk=disk)
        origin.run(LONG)
        assert origin.cache.upkeep.flush()
        world.run(LONG[:8])
        assert world.cache.upkeep.flush()
        used_bytes, known = disk.claimed_bytes, world.known(LONG[:8])
        kept: list[Imported] = []

        def refuse(files: Sequence[DiskFile], points: Sequence[PointRecord]) -> None:
            kept.append(Imported(list(files), list(points)))
            raise QueueFull(64)

        export_tree(source, tmp_path / "archive.tar")
        with pytest.raises(QueueFull):
            import_tree(disk, tmp_path / "archive.tar", "", refuse)

        assert disk.claimed_bytes == used_bytes == world.cache.memory.num_bytes[Tier.DISK] > 0
        world.cache.attach("", kept[0].files, kept[0].points)  # if it is done after all, it finds nothing
        assert disk.claimed_bytes == used_bytes == world.cache.memory.num_bytes[Tier.DISK]
        disk.check()
        assert world.known(LONG[:8]) == known
        world.check()
        origin.cache.upkeep.close()
        world.cache.upkeep.close()


def test_an_edge_that_cannot_be_cut_stays_and_what_needs_the_cut_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(4)
    world = World(MODELS["full"], 4, disk=disk)
    world.run(LONG)
    world.cache.upkeep.flush()
    claimed_bytes = disk.claimed_bytes
    imported = bring(disk, "full", [BRANCH, [50, 51]], "", random.Random(0), 0.0)

    def fail(*given: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(world.engine, "cut", fail)
        world.cache.attach("", imported.files, imported.points)

    world.check()
    assert world.known(LONG) == len(LONG) and world.known(BRANCH) == 9 and world.known([50, 51]) == 2
    assert all(file.num_users for file in disk.live.values()) and disk.claimed_bytes > claimed_bytes


@every_model
def test_what_was_put_but_not_taken_up_is_found_by_the_next_start(model: str) -> None:
    disk = FakeDisk(4)
    bring(disk, model, [LONG], "", random.Random(0), 0.0)

    after = World(MODELS[model], 4, disk=disk.restarted())

    assert after.cache.count_reusable([*LONG, 63]) == len(LONG)


def carry(source: Disk, file: Path, world: World, disk: Disk) -> ImportResult:
    export_tree(source, file)
    return import_tree(disk, file, "", lambda files, points: world.cache.attach("", files, points))


@every_model
def test_an_archive_comes_into_a_tree_that_serves_requests(model: str, tmp_path: Path) -> None:
    with open_disk(tmp_path / "one") as source, open_disk(tmp_path / "other") as disk:
        origin = World(MODELS[model], 4, disk=source)
        chats = [LONG, BRANCH, [*LONG[:13], 33, 34]]
        for chat in chats:
            origin.run(chat, boundaries=[Boundary(5, Mark.SYSTEM_END)])
        assert origin.cache.upkeep.flush()
        world = World(MODELS[model], 4, num_lanes=2, disk=disk)
        traffic = Traffic(world, seed=1)
        for _ in range(5):
            traffic.serve()

        done = carry(source, tmp_path / "archive.tar", world, disk)

        world.check()
        assert done.num_items > 0 and done.problems == ()
        again = carry(source, tmp_path / "archive.tar", world, disk)  # before chats grow, and drop partial pages
        assert again.num_items == 0 and again.problems == ()
        for chat in chats:
            assert world.cache.count_reusable([*chat, 63]) >= origin.cache.count_reusable([*chat, 63])
            assert world.run([*chat, 63]).cached == len(chat)
        world.check()
        disk.check()
        world.cache.upkeep.close()
        origin.cache.upkeep.close()


def test_the_disks_budget_holds_whoever_puts(tmp_path: Path) -> None:
    with open_disk(tmp_path / "one") as source:
        origin = World(MODELS["full"], 4, disk=source)
        origin.run(LONG)
        assert origin.cache.upkeep.flush()
        export_tree(source, tmp_path / "archive.tar")
        origin.cache.upkeep.close()
    with Disk(tmp_path / "small", fingerprint="f", page_tokens=4, budget_bytes=500, floor_bytes=0) as disk:
        world = World(MODELS["full"], 4, disk=disk)
        done = import_tree(disk, tmp_path / "archive.tar", "", lambda files, points: world.cache.attach("", files, points))
        world.check()
        assert done.num_skipped > 0 and "no room" in done.problems[0]
        assert 0 < world.cache.memory.num_bytes[Tier.DISK] == disk.claimed_bytes <= 500
        world.run(BRANCH)
        assert disk.claimed_bytes <= 500
        world.cache.upkeep.close()
