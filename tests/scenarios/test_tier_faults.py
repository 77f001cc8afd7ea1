"""Places when something is in the way: branches, cuts, full and failing places, and what a clean close must not lose."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from bough.cache.disk import Disk
from bough.cache.disk.page_files import KeepReading
from bough.cache.tree.address import DiskFile
from bough.cache.tree.plan import plan
from bough.cache.tree.state import Tier
from bough.errors import DoesNotFit, EngineError
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS, FixedRates
from tests.scenarios.models import copying_lanes
from tests.scenarios.test_tiers import demote_all, tiers
from tests.scenarios.world import World

pytestmark = pytest.mark.usefixtures("lane_kind")

ROW = 8  # bytes of a token in the fake engine's full attention
TRUNK = [1, 2, 3, 4, 5, 6]
CHAT = [*TRUNK, 7, 8, 9, 10, 11, 12]
BRANCH = [*TRUNK, 30, 31, 32, 33, 34, 35, 36]


def clear_lanes(w: World) -> None:
    for slot in w.cache.lanes.slots:
        slot.clear()


def spans(disk: FakeDisk) -> list[tuple[int, int]]:
    """The rows of every file, in order."""
    return sorted((address.start, address.end) for address in disk.platter.files)


def adopted(w: World, prompt: list[int]) -> list[int]:
    """The tokens whose rows a lane takes from the tree alone for this prompt."""
    clear_lanes(w)
    return next(iter(w.begin(prompt).lane.held.values()))[1]


def test_rows_beyond_a_salts_share_do_not_take_the_place_of_another_branch() -> None:
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=1000, host_bytes=4000, salt_share=0.1)
    w.run(CHAT)
    demote_all(w)
    filling = w.begin(range(50, 62))
    w.prefill(filling)
    branch = w.begin(BRANCH)
    w.prefill(branch)
    assert branch.sequence.hold.offset == len(TRUNK) < branch.lane.offset  # its own rows found no room

    w.close(branch)
    w.close(filling)

    assert adopted(w, CHAT) == CHAT[:-1]


@copying_lanes
def test_rows_beyond_the_budget_do_not_take_the_place_of_another_branch() -> None:
    w = World(MODELS["full+recurrent"], 4, budget_bytes=340, host_bytes=4000, chunk=100)
    w.run(CHAT)
    demote_all(w)
    branch = w.begin(BRANCH)
    w.prefill(branch)
    assert branch.sequence.hold.offset == len(TRUNK) < branch.lane.offset

    w.close(branch)

    assert adopted(w, CHAT) == CHAT[:-1]


def test_what_came_back_to_the_device_can_be_moved_down_again() -> None:
    w = World(MODELS["full"], 4, budget_bytes=1000, host_bytes=4000)
    chat = list(range(1, 41))
    w.run(chat)
    demote_all(w)
    w.run(chat)
    assert tiers(w)[Tier.DEVICE] > 0

    w.begin(range(100, 200))

    assert tiers(w)[Tier.DEVICE] < 10 and w.known(chat) == len(chat)


def test_what_comes_back_to_the_device_stays_within_its_salts_share() -> None:
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=2000, host_bytes=4000, salt_share=0.1)
    chats = [list(range(first, first + 20)) for first in (0, 20, 40)]
    for chat in chats:
        w.run(chat, salt="a")
        demote_all(w)

    for chat in chats:
        w.run(chat, salt="a")

    assert 0 < w.cache.forest.tries["a"].memory.num_bytes[Tier.DEVICE] <= 200  # type: ignore[attr-defined]


def test_closing_goes_on_when_one_salts_rows_push_anothers_off_the_disk() -> None:
    disk = FakeDisk(4, 10 * ROW)
    w = World(MODELS["full"], 4, budget_bytes=4000, disk=disk)
    w.run([1, 2, 3, 4, 5], salt="a")
    disk.work()
    demote_all(w)
    disk.is_full = True
    w.run([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="b")
    disk.is_full = False

    w.cache.upkeep.close()

    assert not w.engine.live and spans(disk) == [(0, 4), (4, 8), (8, 9)]


def test_a_page_that_was_cut_before_it_was_written_survives_a_clean_close() -> None:
    disk = FakeDisk(4)
    before = World(MODELS["full"], 4, disk=disk)
    before.run([1, 2, 3, 4, 5, 6])
    before.run([1, 2, 30, 31, 32])
    before.cache.upkeep.close()

    after = World(MODELS["full"], 4, disk=disk.restarted())

    assert after.cache.count_reusable([1, 2, 3, 4, 5, 6]) == 5
    assert after.cache.count_reusable([1, 2, 30, 31, 32]) == 4


def test_a_page_that_was_cut_before_it_was_written_moves_to_disk_when_room_is_short() -> None:
    w = World(MODELS["full"], 4, disk=FakeDisk(4))
    w.run([1, 2, 3, 4])
    w.run([1, 2, 30, 31, 32])

    demote_all(w)

    assert w.known([1, 2, 3, 4]) == 4 and w.cache.residency.evictor.counts.tokens == 0


def test_a_page_cut_in_two_gets_a_file_for_each_half_and_the_old_file_goes() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run([1, 2, 3, 4])
    disk.work()
    assert spans(disk) == [(0, 4)]

    w.run([1, 2, 30, 31])
    disk.work()
    assert spans(disk) == [(0, 2), (0, 4), (2, 4), (2, 4)]  # the old one stays until the new ones are safe
    w.run([1, 2, 30, 31])
    disk.work()

    assert spans(disk) == [(0, 2), (2, 4), (2, 4)]


def test_rows_that_came_back_to_the_device_before_they_were_written_survive_a_clean_close() -> None:
    disk = FakeDisk(4)
    before = World(MODELS["full"], 4, budget_bytes=4000, host_bytes=4000, disk=disk)
    before.run(CHAT)
    demote_all(before)
    assert tiers(before)[Tier.HOST] > 0 and disk.pending
    before.run([*CHAT, 13])
    assert tiers(before)[Tier.HOST] == 0
    before.cache.upkeep.close()

    after = World(MODELS["full"], 4, budget_bytes=4000, host_bytes=4000, disk=disk.restarted())

    assert after.cache.count_reusable([*CHAT, 14]) == len(CHAT)


def test_a_disk_that_takes_nothing_more_does_not_stop_requests() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full+recurrent"], 4, budget_bytes=1400, disk=disk)
    chats = [[first] * 10 for first in range(1, 21)]
    for chat in chats:
        w.run(chat)
    disk.work()
    demote_all(w)
    disk.is_full = True

    for chat in chats:
        w.run([*chat[:5], 30, 31])  # leaves a state at the branch, above what lies on disk
    demote_all(w)

    assert w.cache.memory.num_bytes[Tier.DEVICE] == 0
    assert w.begin([60] * 130).cached == 0


def test_rows_read_from_disk_that_cannot_be_cut_to_size_are_given_back() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run([1, 2, 3, 4, 5])
    disk.work()
    disk.is_full = True  # so that the halves of the cut page share the old file
    w.run([1, 2, 30, 31])
    demote_all(w)
    w.engine.fail_next = "cut"

    session = w.begin([1, 2, 3, 4, 5])  # checks that nothing is held that the tree does not know

    assert w.engine.fail_next is None and session.cached == 0


def test_closing_a_session_goes_on_when_a_page_cannot_be_cut() -> None:
    w = World(MODELS["full+recurrent"], 8, keeps_on_device=False)
    session = w.begin(range(20), [Boundary(5, Mark.SYSTEM_END)])
    w.prefill(session)
    w.engine.fail_next = "cut"

    w.close(session)

    assert w.engine.fail_next is None and not w.cache.lanes.slots[0].is_busy
    w.run(range(20))
    assert tiers(w)[Tier.DEVICE] == 0


def test_clearing_while_a_lane_is_busy_lets_its_restore_points_reach_the_disk() -> None:
    disk, system_end = FakeDisk(4), [Boundary(4, Mark.SYSTEM_END)]
    before = World(MODELS["full+recurrent"], 4, disk=disk)
    before.run([1, 2, 3, 4, 5, 6], boundaries=system_end)
    disk.work()
    busy = before.begin([1, 2, 3, 4, 5, 6, 7], system_end)
    before.cache.upkeep.clear()
    before.prefill(busy)
    before.close(busy)
    assert before.cache.count_reusable([1, 2, 3, 4, 9]) == 4
    before.cache.upkeep.close()

    after = World(MODELS["full+recurrent"], 4, disk=disk.restarted())

    assert after.cache.count_reusable([1, 2, 3, 4, 9]) == 4


@pytest.mark.parametrize("model", ["window", "recurrent"])
def test_a_restart_finds_the_tree_of_a_model_without_full_attention(model: str) -> None:
    disk = FakeDisk(4)
    before = World(MODELS[model], 4, disk=disk)
    before.run(range(1, 30))
    before.cache.upkeep.close()

    after = World(MODELS[model], 4, disk=disk.restarted())

    assert after.cache.count_reusable(range(1, 31)) == 29


def test_a_leaf_that_lost_its_rows_does_not_keep_those_above_it_on_disk() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run([1, 2, 3, 4, 5, 6])
    w.run([1, 2, 3, 4, 9])
    w.cache.upkeep.flush()
    demote_all(w)
    remove_files(disk, start=4)
    for chat in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 9]):
        w.begin(chat).close()
        demote_all(w)
    assert w.cache.residency.loader.counts.misses == 2

    while w.cache.residency.evictor.evict_one(Tier.DISK):
        w.check()

    assert w.cache.memory.num_bytes[Tier.DISK] == 0 and not w.cache.forest.tries


def remove_files(disk: FakeDisk, start: int) -> None:
    """Take away the files of all pages that begin at this row."""
    for address in [address for address in disk.platter.files if address.start == start]:
        del disk.platter.files[address]


@copying_lanes
def test_a_request_is_refused_after_few_plans_where_nothing_will_go(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = count()

    def counted(*args: object) -> int:
        next(plans)
        return plan(*args)  # type: ignore[arg-type]

    w = World(MODELS["full"], 4, budget_bytes=3 * 400 * ROW, host_bytes=1 << 20)
    chat = list(range(400))
    w.run(chat)
    clear_lanes(w)
    monkeypatch.setattr("bough.cache.adoption.plan", counted)
    monkeypatch.setattr(w.cache.residency.evictor, "evict_one", lambda *_: False)

    with pytest.raises(DoesNotFit):
        w.begin([*chat, 7], max_new=600)

    assert next(plans) <= 40


class TimedDisk(FakeDisk):
    """A disk that reads a page in 0.01 s."""

    def read(self, disk_file: DiskFile, keep_reading: KeepReading) -> bytearray:
        self.reader.now_s += 0.01
        return super().read(disk_file, keep_reading)


@pytest.mark.parametrize("model", ["full", "full+window", "full+recurrent", "window+recurrent+full"])
def test_loading_goes_on_while_computing_all_that_is_left_would_take_longer(model: str) -> None:
    """A page is read in 0.01 s, and holds 8 tokens, of which each takes 0.02 s to compute."""
    disk = TimedDisk(8)
    w = World(MODELS[model], 8, disk=disk, rates=FixedRates(0.02, {Tier.DISK: 0.01 / 64}))
    w.cache.residency.loader.clock = lambda: disk.reader.now_s
    chat = list(range(194))  # the rows of the window at its end lie in two pages
    w.run(chat)
    demote_all(w)
    disk.reader.is_slow = True

    session = w.begin([*chat, 7])
    while session.advance_loading():
        assert disk.reader.finish(0)

    assert session.cached == len(chat)


def test_closing_does_not_count_as_use() -> None:
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run([1, 2, 3, 4])
    for _ in range(5):
        w.run([9, 8, 7, 6])
    disk.work()
    used = last_used(disk)
    assert len(set(used)) == 2

    w.cache.upkeep.close()

    assert last_used(disk) == used


def last_used(disk: FakeDisk) -> list[float]:
    """When each file was used last."""
    return [at for _, _, at in disk.platter.files.values()]


def test_a_restore_point_lives_on_disk_as_long_as_its_pages_are_used(tmp_path: Path) -> None:
    system, system_end, ttl_s = [1, 2, 3, 4, 5, 6, 7, 8], [Boundary(8, Mark.SYSTEM_END)], 40.0
    before = World(MODELS["full+recurrent"], 4, disk=open_disk(tmp_path), ttl_s=ttl_s)
    before.run([*system, 20], boundaries=system_end)
    first_s = before.cache.clock.wall()
    for last in range(21, 41):
        before.run([*system, last], boundaries=system_end)
    now_s = before.cache.clock.wall()
    assert now_s - first_s > ttl_s
    before.cache.upkeep.close()

    after = World(MODELS["full+recurrent"], 4, disk=open_disk(tmp_path, ttl_s=ttl_s, now_s=now_s), ttl_s=ttl_s)

    assert after.cache.count_reusable([*system, 50]) == len(system)
    after.cache.upkeep.close()


def open_disk(folder: Path, *, ttl_s: float | None = None, now_s: float = 0.0) -> Disk:
    return Disk(
        folder / "tree",
        fingerprint="f" * 64,
        page_tokens=4,
        budget_bytes=1 << 30,
        floor_bytes=0,
        ttl_s=ttl_s,
        clock=lambda: now_s,
    )


@copying_lanes
@pytest.mark.parametrize("where", ["reserve", "publish"])
@pytest.mark.parametrize("error", [EngineError, MemoryError])
def test_an_engine_without_memory_is_asked_again_after_something_was_let_go(where: str, error: type[Exception]) -> None:
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=100_000)
    w.run(list(range(1, 33)), [1])
    w.engine.fail_next, w.engine.fail_with = where, error

    done = w.run(list(range(40, 60)), [1])

    assert done.computed == 20
    assert w.known(list(range(40, 60))) == 20
    assert w.known(list(range(1, 33))) < 32 or w.cache.lanes.slots[0].lane.nbytes == 0  # something made way


def test_an_engine_that_has_no_memory_at_all_fails_that_request_only() -> None:
    w = World(MODELS["full"], 4, budget_bytes=100_000)
    w.engine.fail_next, w.engine.fail_with = "reserve", MemoryError
    with pytest.raises(MemoryError):
        w.begin(list(range(1, 9)))
    w.check()
    assert w.run(list(range(1, 9))).computed == 8


def test_what_lies_on_disk_alone_and_was_lost_there_is_a_miss_when_it_is_wanted() -> None:
    """Two halves of a page share its file, which is found damaged; the file of the second half alone was never written."""
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk)
    w.run([1, 2, 3])
    disk.work()
    w.run([1, 9])
    demote_all(w)
    disk.fail_next = "read"
    assert w.begin([1, 7]).cached == 0
    w.sessions[-1].close()
    disk.work()
    w.run([50])  # files that newer ones replaced, or that failed, are dropped now
    w.check()

    w.run([1, 9])  # the first half is there again
    clear_lanes(w)
    assert w.run([1, 2, 3, 4]).cached == 1
    assert w.cache.residency.loader.counts.misses == 2
