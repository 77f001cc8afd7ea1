"""Long work on the tree beside requests: it stops at any step, requests go on, and the tree is whole all the time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bough.cache.admin.archive import export_tree, import_tree
from bough.cache.disk import Disk, DiskError, page_files
from bough.cache.steps import Result, Steps
from bough.cache.upkeep import SaveResult
from bough.generate.generation import ChunkSize
from bough.runtime.cache_handle import CacheHandle
from bough.scheduling.scheduler import Scheduler
from bough.scheduling.worker import Limits, Worker
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World

pytestmark = pytest.mark.usefixtures("lane_kind")

every_model = pytest.mark.parametrize("model", MODELS)


def open_disk(folder: Path) -> Disk:
    return Disk(folder, fingerprint="f", page_tokens=4, budget_bytes=1 << 30, floor_bytes=0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with open_disk(tmp_path / "tree") as disk:
        yield disk


class Traffic:
    """Chats that share beginnings, grow and part; as `run`, it serves some of them between any two steps of a work."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.chats: list[list[int]] = []
        self.num_interruptions = 0

    def serve(self) -> None:
        chance = self.chance
        begin = chance.choice(self.chats) if self.chats and chance.random() < 0.8 else [chance.randrange(3)]
        chat = [
            *begin[: chance.randrange(1, len(begin) + 1)],
            *(chance.randrange(60) for _ in range(chance.randrange(1, 9))),
        ]
        self.chats.append(self.world.run(chat, [chance.randrange(60) for _ in range(3)]).tokens)

    def __call__(self, start: Callable[[], Steps[Result]]) -> Result:
        steps = start()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            self.world.check()
            if self.chance.random() < 0.2:
                self.num_interruptions += 1
                self.serve()


@every_model
def test_an_export_beside_requests_has_all_that_was_there_when_it_began(model: str, disk: Disk, tmp_path: Path) -> None:
    world = World(MODELS[model], 4, num_lanes=2, disk=disk)
    traffic = Traffic(world)
    for _ in range(20):
        traffic.serve()
    chats = {tuple(chat): world.cache.count_reusable([*chat, 61]) for chat in traffic.chats}

    assert world.cache.upkeep.save("", traffic) == SaveResult(is_written=True)
    exported = export_tree(disk, tmp_path / "archive.tar")

    assert traffic.num_interruptions > 5 and exported.num_skipped == 0
    with open_disk(tmp_path / "other") as other:
        import_tree(other, tmp_path / "archive.tar", "guest")
        again = World(MODELS[model], 4, disk=other)
        for chat in chats:
            found = again.cache.forest.find("guest").match(chat)
            assert found.length == len(chat)
            if world.is_full_only:  # else requests may have made restore points redundant
                assert again.cache.count_reusable([*chat, 61], "guest") == chats[chat]
        again.cache.upkeep.close()
    world.cache.upkeep.close()


def test_an_export_beside_a_disk_that_backs_off_fails_in_place_of_leaving_something_out(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.cache.disk.writer.FIRST_BACK_OFF_S", 60.0)
    world = World(MODELS["full"], 4, disk=disk)
    with handle_of(world) as handle:
        world.run([1, 2, 3, 4, 5])
        assert handle.flush()
        with monkeypatch.context() as patch:
            patch.setattr(page_files, "write_some", fail)
            world.run([6, 7, 8, 9, 10])
            assert not handle.flush() and not disk.can_write

        assert not handle.flush()
        with pytest.raises(DiskError, match="could not be saved"):
            handle.export_file(tmp_path / "archive.tar")


@contextmanager
def handle_of(world: World) -> Iterator[CacheHandle]:
    """A handle whose work runs on a real engine's thread, while no request of the world runs."""
    scheduler = Scheduler(world.engine, world.cache, ChunkSize(3), time.monotonic)
    with closing(Worker(scheduler, Limits(), take_stats=dict, on_idle=lambda: False)) as worker:
        yield CacheHandle(world.cache, SimpleNamespace(prompts=SimpleNamespace(decode=str)), worker)  # type: ignore[arg-type]


def fail(*given: object) -> int:
    raise OSError(28, "no space")


def test_an_export_counts_what_the_disk_has_no_room_for(tmp_path: Path) -> None:
    with Disk(tmp_path / "tree", fingerprint="f", page_tokens=4, budget_bytes=700, floor_bytes=0) as disk:
        world = World(MODELS["full"], 4, disk=disk)
        for first in range(6):
            world.run([100 + first, *range(1, 17)])
        with handle_of(world) as handle:
            done = handle.export_file(tmp_path / "archive.tar")

        num_items = len(list(world.cache.forest.items()))
        assert 0 < done.num_items < num_items == done.num_items + done.num_skipped


@every_model
@pytest.mark.parametrize("salt", [None, ""])
def test_clearing_beside_requests_leaves_only_what_came_meanwhile(model: str, salt: str | None) -> None:
    disk = FakeDisk(4)
    world = World(MODELS[model], 4, num_lanes=2, disk=disk, budget_bytes=6000)
    traffic = Traffic(world)
    for number in range(20):
        traffic.serve()
        if number == 10:
            disk.work()
    old = list(traffic.chats)
    world.run([1, 2, 3, 4, 5], salt="other")
    busy = world.begin([*old[0], 61])

    traffic.chats.clear()
    world.cache.upkeep.clear(salt, traffic)
    world.check()

    assert traffic.num_interruptions > 5
    assert world.known([1, 2, 3, 4, 5], "other") == (0 if salt is None else 5)
    new = [*traffic.chats, old[0]]
    for chat in old:
        shared = max(_shared(chat, other) for other in new)
        assert world.known(chat) <= shared
    roots = {address.root for address in disk.platter.files}
    assert disk.root("") not in roots and (disk.root("other") in roots) is (salt is not None and bool(roots))
    world.prefill(busy)
    world.close(busy)


def _shared(first: list[int], second: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
