"""The owner of a tree is killed while another process reads the tree: no wrong token, and no error beyond a miss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cache.disk import DiskBusy
from tests.crash.nursery import Nursery
from tests.crash.recovery import paths, recover
from tests.crash.seeds import seeds
from tests.crash.tree import SALTS, Promises, Request, Setup, serve
from tests.crash.worker import Busy, Job
from tests.scenarios.world import World
from tests.waiting import wait_until

NUM_OWNERS = 12


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("seed", seeds(NUM_OWNERS))
def test_a_reader_outlives_the_owner_that_is_killed(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    """The world compares what is read with its tokens. What is left after the kill stays as it is, for the next owner."""
    setup, chance = Setup(seed), random.Random(seed)
    folder = tmp_path / "trees" / "tree"
    readers: list[World] = []
    with nursery.living(Job(str(folder), str(tmp_path / "journal"), seed, 0), "flushed") as owner_pid:
        for _ in range(2):
            readers.append(open_reader(setup, folder, owner_pid))
            ask_for_all(readers[-1])
            ask(setup, readers[-1], chance)
    ask(setup, readers[0], chance)
    before = snapshot(folder)
    for reader in readers:
        ask(setup, reader, chance)
        reader.check()
    loaded_bytes = sum(reader.stats()["disk_loaded_bytes"] for reader in readers)  # type: ignore[misc]
    assert loaded_bytes > 0 or not setup.is_ample  # else the owner may have dropped what there was
    for reader in readers:
        reader.cache.upkeep.close()
    assert snapshot(folder) == before
    recover(setup, folder, Promises(), chance)


def open_reader(setup: Setup, folder: Path, owner_pid: int) -> World:
    """A reader that has found something: the first requests may have been cancelled before there was anything to save."""
    readers: list[World] = []

    def finds_something() -> bool:
        for earlier in readers:
            earlier.cache.upkeep.close()
        readers[:] = [setup.open(folder, Busy, not_owner=busy(setup, folder, owner_pid))]
        return bool(readers[0].stats()["disk_files"])

    wait_until(finds_something)
    return readers[0]


def busy(setup: Setup, folder: Path, owner_pid: int) -> DiskBusy:
    with pytest.raises(DiskBusy) as raised:
        setup.open_disk(folder)
    assert raised.value.pid == owner_pid
    return raised.value


def ask_for_all(reader: World) -> None:
    """Go on from the end of everything that the reader has found."""
    known = [(salt, tokens) for salt in set(SALTS) for tokens in paths(reader.cache, salt)]
    for salt, tokens in known:
        serve(reader, Request(salt, [*tokens, 61], []))


def ask(setup: Setup, reader: World, chance: random.Random) -> None:
    for _ in range(8):
        serve(reader, setup.make_request(chance))


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file of a folder with its size and time, but for the memory that SQLite keeps of its log."""
    found = {file: file.stat() for file in folder.rglob("*") if not file.name.endswith("-shm")}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}
