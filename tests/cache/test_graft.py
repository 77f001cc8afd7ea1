"""An import comes into a tree that is in use: nothing in memory goes, and what was missing is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bough.cache.admin.archive import ImportResult, export_tree, import_tree
from bough.cache.disk import Disk
from bough.cache.steps import RunSteps, Steps, run_at_once
from bough.cache.tree.state import Tier
from bough.errors import QueueFull, RequestError
from bough.types import Boundary, Mark
from tests.cache.admin.donor import bring
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_interleaved import Traffic, open_disk
from tests.scenarios.test_tiers import demote_all, tiers
from tests.scenarios.world import World

LONG = list(range(1, 23))
BRANCH = [*LONG[:9], *range(40, 52)]
every_model = pytest.mark.parametrize("model", MODELS)
with_rows = pytest.mark.parametrize("model", [model for model in MODELS if "full" in model])


def graft(world: World, disk: FakeDisk, model: str, chats: list[list[int]], salt: str = "", loss: float = 0.0) -> None:
    steps = bring(disk, model, chats, salt, random.Random(0), loss)
    run_at_once(lambda: world.cache.graft(salt, steps))
    world.check()


@every_model
def test_what_is_imported_into_an_empty_tree_is_reused(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)

    graft(world, disk, model, [LONG, BRANCH], "mine")

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

    graft(world, disk, model, [BRANCH, [*LONG, 30, 31], LONG[:15]])

    assert world.cache.memory.tree_bytes == before > 0 and tiers(world)[Tier.DISK] > 0
    assert world.known(BRANCH) == len(BRANCH) and world.known([*LONG, 30, 31]) == len(LONG) + 2
    world.prefill(busy)
    world.close(busy)
    assert world.run([*BRANCH, 63]).cached == len(BRANCH)


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

    graft(world, disk, "full", [LONG])

    assert not trie.match(LONG).node.has_holes
    assert world.cache.count_reusable([*LONG, 63]) == len(LONG)


@with_rows
def test_files_that_find_no_place_are_dropped(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)
    imported = bring(disk, model, [LONG], "", random.Random(0), 0.0)
    for step in imported.steps:
        if step.end == 8:
            for file in step.files:
                disk.live.pop(file.address)  # it was cleared meanwhile

    run_at_once(lambda: world.cache.graft("", imported))
    world.check()

    assert world.known(LONG) == 4
    assert all(address.end <= 4 for address in disk.live) and all(file.num_users for file in disk.live.values())
    assert all(address.end <= 4 for address in disk.platter.points)


@every_model
def test_an_import_that_is_given_up_leaves_a_whole_tree_and_no_file_without_a_user(model: str) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, disk=disk)
    work = world.cache.graft("", bring(disk, model, [LONG, BRANCH], "", random.Random(0), 0.0))
    for _ in range(5):
        next(work)
        world.check()

    work.close()

    world.check()
    assert all(file.num_users for file in disk.live.values())
    assert 0 < world.cache.memory.num_bytes[Tier.DISK] == disk.claimed_bytes or "full" not in model


@pytest.mark.parametrize("model", ["full", "window+recurrent+full"])
def test_an_import_that_is_refused_before_its_first_step_leaves_no_file(model: str, tmp_path: Path) -> None:
    with open_disk(tmp_path / "one") as source, open_disk(tmp_path / "other") as disk:
        origin, world = World(MODELS[model], 4, disk=source), World(MODELS[model], 4, disk=disk)
        origin.run(LONG)
        assert origin.cache.upkeep.flush()
        world.run(LONG[:8])
        assert world.cache.upkeep.flush()
        used_bytes, works = disk.claimed_bytes, []

        def refuse(start: Callable[[], Steps[None]]) -> None:
            works.append(start())
            raise QueueFull(64)

        with pytest.raises(QueueFull):
            carry(source, tmp_path / "archive.tar", world, disk, refuse)  # type: ignore[arg-type]

        assert disk.claimed_bytes == used_bytes == world.cache.memory.num_bytes[Tier.DISK] > 0
        assert list(works[0]) == []  # if it is begun after all, it does nothing
        disk.check()
        assert world.known(LONG) == 8
        world.check()
        origin.cache.upkeep.close()
        world.cache.upkeep.close()


@every_model
def test_what_was_put_but_not_taken_up_is_found_by_the_next_start(model: str) -> None:
    disk = FakeDisk(4)
    bring(disk, model, [LONG], "", random.Random(0), 0.0)

    after = World(MODELS[model], 4, disk=disk.restarted())

    assert after.cache.count_reusable([*LONG, 63]) == len(LONG)


def carry(source: Disk, file: Path, world: World, disk: Disk, run: RunSteps) -> ImportResult:
    export_tree(source, file)
    return import_tree(disk, file, graft=lambda steps: run(lambda: world.cache.graft("", steps)))


@pytest.mark.parametrize("model", [model for model in MODELS if "full" not in model])
def test_a_tree_that_no_archive_can_hold_is_not_exported(model: str, tmp_path: Path) -> None:
    with open_disk(tmp_path / "one") as source:
        origin = World(MODELS[model], 4, disk=source)
        origin.run(LONG)
        assert origin.cache.upkeep.flush()

        with pytest.raises(
            RequestError, match=r"no layers with full attention, .* of up to 22 tokens, .* pages of 4 tokens"
        ):
            export_tree(source, tmp_path / "archive.tar")

        assert [entry.name for entry in tmp_path.iterdir()] == ["one"]
        origin.cache.upkeep.close()


@with_rows
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

        done = carry(source, tmp_path / "archive.tar", world, disk, traffic)

        world.check()
        assert done.num_items > 0 and done.problems == () and traffic.num_interruptions > 3
        again = carry(source, tmp_path / "archive.tar", world, disk, traffic)  # before chats grow, and drop partial pages
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
        done = import_tree(
            disk, tmp_path / "archive.tar", graft=lambda steps: run_at_once(lambda: world.cache.graft("", steps))
        )
        world.check()
        assert done.num_skipped > 0 and "no room" in done.problems[0]
        assert 0 < world.cache.memory.num_bytes[Tier.DISK] == disk.claimed_bytes <= 500
        world.run(BRANCH)
        assert disk.claimed_bytes <= 500
        world.cache.upkeep.close()
