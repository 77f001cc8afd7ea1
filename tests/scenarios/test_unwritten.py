"""Evictions beside a disk that is behind: nothing waits, what is written goes first, and budgets hold at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bough.cache.disk import Disk, page_files
from bough.cache.residency.evictor import Evictor
from bough.cache.tree.state import Tier
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_tiers import tiers
from tests.scenarios.world import World
from tests.waiting import BOUND_S

pytestmark = pytest.mark.usefixtures("lane_kind")

OLD = list(range(1, 17))
NEW = list(range(40, 56))


def evictor_of(w: World) -> Evictor:
    for slot in w.cache.lanes.slots:
        slot.clear()
    return w.cache.residency.evictor


def tokens_dropped(w: World) -> int:
    return w.cache.residency.evictor.counts.tokens


@pytest.mark.parametrize("model", MODELS)
def test_what_is_written_is_demoted_in_place_of_older_content_that_is_not(model: str) -> None:
    disk = FakeDisk(4)
    w = World(MODELS[model], 4, disk=disk)
    w.run(NEW)
    disk.work()
    w.run(OLD)
    for node in w.cache.forest.tries[""].match(OLD).path:
        node.last_used = node.previous_used = 0.0
        w.cache.residency.evictor.offer(w.cache.forest.tries[""], node)
    evictor = evictor_of(w)

    while evictor.evict_one(spares_waiting=True):
        w.check()

    assert disk.pending and w.known(OLD) == 16 and w.known(NEW) == 16
    held = [item for node in w.cache.forest.tries[""].match(NEW).path for item in node.items()]
    assert held and all(item.tier is Tier.DISK for item in held)
    assert not any(item.tier is Tier.DISK for node in w.cache.forest.tries[""].match(OLD).path for item in node.items())


def test_what_was_set_aside_has_its_place_in_the_order_again_once_it_is_written() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run(OLD)
    evictor = evictor_of(w)
    assert not evictor.evict_one(spares_waiting=True)
    disk.work()
    w.run(NEW)
    disk.work()

    assert evictor_of(w).evict_one()

    assert w.known(OLD) == w.known(NEW) == 16 and tokens_dropped(w) == 0
    (node,) = w.cache.forest.tries[""].match(OLD).path
    assert tiers(w)[Tier.DISK] == 1 and any(item.tier is Tier.DISK for item in node.items())


def test_a_write_that_failed_gives_its_place_back_too() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run(OLD[:4])
    evictor = evictor_of(w)
    assert not evictor.evict_one(spares_waiting=True)
    disk.fail_next = "write"
    disk.work()
    disk.is_full = True

    assert evictor.evict_one(spares_waiting=True)

    assert w.known(OLD[:4]) == 0


def test_the_saved_head_of_a_path_is_demoted_before_its_unwritten_tail_is_dropped() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run(OLD[:12])
    disk.work()
    w.run(OLD)  # its last page waits
    evictor = evictor_of(w)

    for _ in range(3):
        assert evictor.evict_one()
        w.check()

    assert w.known(OLD) == 16 and tiers(w) == {Tier.DEVICE: 1, Tier.HOST: 0, Tier.DISK: 3}


@pytest.mark.parametrize("host_bytes", [0, 128])
def test_where_nothing_is_written_the_least_valuable_is_dropped(host_bytes: int) -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk, host_bytes=host_bytes)
    w.run(OLD)
    w.run(NEW)
    evictor = evictor_of(w)
    room = host_bytes // 32  # pages that the host takes

    for _ in range(4 + room):
        assert evictor.evict_one()
        w.check()

    assert w.known(OLD) == 0 and w.known(NEW) == 16
    assert tiers(w)[Tier.HOST] == room


def test_a_full_disk_keeps_the_writes_that_are_queued() -> None:
    """Two chats of which only one fits: neither pushes the other's writes out before they are made."""
    disk = FakeDisk(4, 16 * 8)
    w = World(MODELS["full"], 4, disk=disk)
    w.run(OLD)
    w.run(NEW)
    evictor = evictor_of(w)
    queued = set(disk.pending)

    for _ in range(20):
        evictor.evict_one(spares_waiting=True)

    assert set(disk.pending) == queued


@pytest.mark.parametrize("model", MODELS)
def test_files_that_were_to_be_deleted_and_are_used_again_are_left_to_the_disk_at_once(model: str) -> None:
    """Two chats of which only one fits: dropping a file for the other's would only let it be used again, without end."""
    disk = FakeDisk(4)
    w = World(MODELS[model], 4, disk=disk)
    w.run(OLD)
    w.run(NEW)
    disk.work()
    disk.budget_bytes = disk.claimed_bytes // 2
    evictor = evictor_of(w)
    while disk.claimed_bytes > disk.budget_bytes:
        assert evictor.evict_one(Tier.DISK)

    num_evictions = 0
    while w.cache.memory.tree_bytes:  # the disk deletes nothing meanwhile
        assert evictor.evict_one()
        w.check()
        num_evictions += 1

    assert disk.num_revived and num_evictions < 50


class Hanging:
    """A file system on which every write, and every look at the free space, hangs until it may go on."""

    def __init__(self) -> None:
        self.may_go_on, self.num_hung, self.threads = threading.Event(), 0, set[str]()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*given: object) -> object:
            self.num_hung += 1
            self.threads.add(threading.current_thread().name)
            assert self.may_go_on.wait(60)
            return function(*given)

        return hang


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """Writes hang inside the block."""
    hung = Hanging()
    with monkeypatch.context() as patch:
        for name in ("write_some", "sync", "free_bytes"):
            patch.setattr(page_files, name, hung.wrap(getattr(page_files, name)))
        patch.setattr("bough.cache.disk.writer.MEASURE_AFTER_S", 0.0)
        try:
            yield hung
        finally:
            hung.may_go_on.set()


@pytest.mark.parametrize("host_bytes", [0, 800])
@pytest.mark.parametrize("model", ["full", "window+recurrent+full"])
def test_a_disk_that_hangs_on_every_write_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, host_bytes: int
) -> None:
    disk = Disk(tmp_path, fingerprint="f", page_tokens=4, budget_bytes=1 << 20, floor_bytes=0)
    w = World(MODELS[model], 4, num_lanes=2, budget_bytes=1600, host_bytes=host_bytes, disk=disk)
    with hanging(monkeypatch) as hung:
        for first in range(40):  # each step checks the budgets
            w.run([first + 100, *OLD], [1, 2])
        assert hung.num_hung and hung.threads == {"bough disk writer"}
        assert disk.counts.saved == 0 and tokens_dropped(w) > 0
    assert disk.flush(4 * BOUND_S)
    dropped = tokens_dropped(w)

    for first in range(4):
        w.run([first + 200, *OLD], [1, 2])
        assert w.cache.upkeep.flush()
    assert tokens_dropped(w) == dropped  # it keeps up again
    w.cache.upkeep.close()


def test_free_space_that_was_measured_long_ago_is_less_what_was_claimed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "free_bytes", lambda folder: 10_000)
    disk = Disk(tmp_path, fingerprint="f", page_tokens=4, budget_bytes=1 << 20, floor_bytes=4_000)
    w = World(MODELS["full"], 4, disk=disk)
    with hanging(monkeypatch):
        for first in range(40):
            w.run([first + 100, *OLD])
        assert 5_000 < disk.pending_bytes <= 6_000
    w.cache.upkeep.close()
