"""Loading as a phase: what lies on disk is read while others go on, shared, given up, cancelled, and never leaks."""

from __future__ import annotations

from collections import Counter

import pytest

from bough.cache.disk.page_files import KeepReading
from bough.cache.residency import loading
from bough.cache.residency.loading import STALLED_S
from bough.cache.session import Session
from bough.cache.tree.address import DiskFile
from bough.cache.tree.state import Tier
from bough.errors import DoesNotFit, EngineError
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS, FixedRates
from tests.scenarios.models import copying_lanes
from tests.scenarios.test_tiers import LONG, OTHER, demote_all, tiers
from tests.scenarios.world import World

pytestmark = pytest.mark.usefixtures("lane_kind")


class CountingDisk(FakeDisk):
    """Counts how often each file is read."""

    def __init__(self, page_tokens: int, budget_bytes: int = 1 << 40) -> None:
        super().__init__(page_tokens, budget_bytes)
        self.num_reads = Counter[DiskFile]()

    def read(self, disk_file: DiskFile, keep_reading: KeepReading) -> bytearray:
        self.num_reads[disk_file] += 1
        return super().read(disk_file, keep_reading)


class SlowWorld(World):
    """A world whose disk reads nothing until `read` says so, and whose time passes when `wait` says so."""

    def __init__(self, model: str, **options: object) -> None:
        self.disk = CountingDisk(4)
        super().__init__(MODELS[model], 4, disk=self.disk, **options)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.cache.residency.loader.clock = lambda: self.now_s
        self.disk.reader.is_slow = True

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.disk.reader.now_s += seconds

    def read(self, session: Session, number: int | None = None, *, newest_first: bool = False) -> None:
        """Let so many reads end, or all, and look after each what has arrived."""
        while session.is_loading and number != 0 and self.disk.reader.finish(-1 if newest_first else 0):
            number = None if number is None else number - 1
            session.advance_loading()
            self.check()


def on_disk(model: str = "full", **options: object) -> SlowWorld:
    """A world that has LONG on disk alone."""
    w = SlowWorld(model, **options)
    w.run(LONG, [1])
    demote_all(w)
    assert tiers(w)[Tier.DEVICE] == tiers(w)[Tier.HOST] == 0
    return w


@pytest.mark.parametrize("host_bytes", [0, 10_000])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_lane_stands_when_all_has_arrived_in_whatever_order(model: str, newest_first: bool, host_bytes: int) -> None:
    w = SlowWorld(model, host_bytes=host_bytes)
    w.run(LONG, [1])
    w.disk.work()
    demote_all(w)
    demote_host(w)
    session = w.begin(LONG)
    assert session.is_loading and session.cached == len(LONG) - 1 and session.offset == 0

    w.read(session, newest_first=newest_first)

    assert not session.is_loading and session.tokens.tolist() == LONG[:-1]
    w.prefill(session)
    w.close(session)


def demote_host(w: World) -> None:
    while w.cache.residency.evictor.evict_one(Tier.HOST):
        w.check()


def test_progress_tells_how_far_the_rows_reach_without_a_gap() -> None:
    w = on_disk()
    session = w.begin(LONG)
    seen = [session.loaded_tokens]
    while session.is_loading:
        w.read(session, 1)
        seen.append(session.loaded_tokens)
    assert seen == [0, 4, 8, 12, 16, 20, 24, 28, 31]


def test_requests_that_want_the_same_page_share_one_read() -> None:
    w = on_disk(num_lanes=3)
    sessions = [w.begin([*LONG, 90 + number]) for number in range(3)]
    assert all(session.is_loading for session in sessions)

    w.read(sessions[1])
    for session in sessions:
        session.advance_loading()

    assert not any(session.is_loading for session in sessions)
    assert {session.cached for session in sessions} == {len(LONG)}
    assert set(w.disk.num_reads.values()) == {1}
    w.check()


def test_a_read_goes_on_for_those_who_still_want_it() -> None:
    w = on_disk(num_lanes=2)
    first, second = w.begin(LONG), w.begin([*LONG, 99])
    w.read(first, 3)
    w.close(first)

    w.read(second)

    assert second.cached == len(LONG) and set(w.disk.num_reads.values()) == {1}


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("model", MODELS)
def test_cancelling_a_load_leaves_nothing_behind_but_what_was_read(model: str, num_read: int) -> None:
    w = on_disk(model)
    session = w.begin(LONG)
    w.read(session, num_read)
    w.close(session)
    assert not w.cache.forest.holds and not any(w.cache.memory.reserved_bytes.values())
    assert w.disk.reader.num_reads == 0

    again = w.begin(LONG)
    w.read(again)
    assert again.cached == len(LONG) - 1


def test_cancelling_a_load_leaves_the_idle_lane_as_it_was() -> None:
    """The lane shares the beginning of the prompt, the rest of which lies on disk."""
    w = on_disk(num_lanes=1)
    w.disk.reader.is_slow = False
    w.run(LONG[:9])
    w.disk.reader.is_slow = True
    before = w.cache.lanes.slots[0].tokens
    session = w.begin(LONG)
    assert session.is_loading
    w.close(session)
    slot = w.cache.lanes.slots[0]
    assert slot.tokens == before and not slot.is_busy
    again = w.begin(LONG[:9])
    assert again.cached == 8 and not again.is_loading


def test_a_lane_that_is_still_loading_cannot_be_published() -> None:
    w = on_disk()
    session = w.begin(LONG)
    assert session.is_loading and not session.is_whole
    with pytest.raises(AssertionError):
        session.publish()
    w.read(session)
    assert session.is_whole
    session.publish()
    w.close(session)


def test_a_load_that_is_cancelled_twice_gives_its_lane_back_once() -> None:
    w = on_disk(num_lanes=1, is_pooled=False)
    session = w.begin(LONG)
    assert session.is_loading and w.cache.lanes.num_busy == 1
    before = w.cache.reuse_version()
    w.close(session)
    w.close(session)  # a second time does nothing
    assert w.cache.lanes.num_busy == 0 and not w.cache.forest.holds
    assert w.cache.reuse_version() != before
    assert w.run([70, 71]).computed == 2


def test_a_device_that_keeps_nothing_keeps_nothing_of_a_cancelled_load_either() -> None:
    w = SlowWorld("full", keeps_on_device=False)
    w.run(LONG, [1])
    w.disk.work()
    w.cache.finisher.clear_device()
    session = w.begin(LONG)
    w.read(session, 3)
    assert w.cache.memory.num_bytes[Tier.DEVICE] > 0
    w.close(session)
    assert w.cache.memory.num_bytes[Tier.DEVICE] == 0


def test_loads_of_one_salt_together_stay_within_its_share() -> None:
    row = 8
    w = SlowWorld("full", num_lanes=4, host_bytes=100 * row, budget_bytes=2000 * row, salt_share=0.5)
    for chat in (LONG, OTHER):
        w.run(chat, salt="team")
    demote_all(w)
    demote_host(w)
    sessions = [w.begin(chat, salt="team") for chat in (LONG, OTHER)]
    memory = w.cache.forest.tries["team"].memory
    assert 0 < memory.used_bytes(Tier.HOST) <= 50 * row
    for session in sessions:
        w.read(session)
        w.close(session)
    assert memory.used_bytes(Tier.HOST) <= 50 * row


def test_a_page_that_is_damaged_costs_what_follows_it() -> None:
    w = on_disk()
    session = w.begin(LONG)
    w.read(session, 3)
    w.disk.fail_next = "read"
    w.read(session)
    assert session.cached == 12 and w.cache.residency.loader.counts.misses == 1
    assert session.loading.recomputed_tokens == len(LONG) - 1 - 12
    w.prefill(session)
    w.close(session)
    assert w.known(LONG) == len(LONG)


def test_no_memory_for_a_page_costs_what_follows_it_and_loses_nothing() -> None:
    w = on_disk()
    session = w.begin(LONG)
    w.read(session, 2)
    w.engine.fail_next, w.engine.fail_with = "unpack", EngineError
    w.read(session)
    assert session.cached == 8 and w.cache.residency.loader.counts.failed_loads == 1
    w.close(session)
    assert w.cache.count_reusable(LONG) == len(LONG) - 1


def test_a_disk_that_turns_out_slower_than_computing_is_given_up_and_known_afterwards() -> None:
    w = on_disk()
    w.cache.residency.loader.rates.note_prefill(0, 100, 1.0)
    session = w.begin(LONG)
    w.wait(1.0)
    w.read(session, 1)

    assert not session.is_loading and session.cached == 4  # a page a second, and a hundred tokens could be computed
    assert session.loading.recomputed_tokens == len(LONG) - 1 - 4
    w.close(session)
    demote_all(w)
    again = w.begin(LONG)
    assert not again.is_loading and again.cached == 0
    assert again.loading.recomputed_tokens == len(LONG) - 1 and again.loading.estimated_load_s > 1


def test_what_has_arrived_before_a_load_is_given_up_is_used() -> None:
    rates = FixedRates(token_s=1.0)
    w = on_disk(rates=rates)
    session = w.begin(LONG)
    w.read(session, 5)
    w.wait(1000.0)
    session.advance_loading()
    assert not session.is_loading and session.cached == 20
    assert session.loading.disk_bytes == 20 * 8 and session.loading.recomputed_tokens == 11


@pytest.mark.parametrize("model", MODELS)
def test_a_disk_that_delivers_nothing_is_not_waited_for(model: str) -> None:
    """Nothing was computed yet: what computing takes is not known."""
    w = on_disk(model)
    session = w.begin(LONG)
    w.wait(STALLED_S - 1)
    assert session.advance_loading()
    w.wait(2.0)
    assert not session.advance_loading() and session.cached == 0
    w.prefill(session)
    w.close(session)


@copying_lanes
def test_what_is_being_read_has_its_room_reserved() -> None:
    row = 8
    w = SlowWorld("full", num_lanes=2, budget_bytes=130 * row)
    w.run(LONG)
    w.run(OTHER)
    demote_all(w)
    session = w.begin(LONG)
    reserved = w.cache.memory.reserved_bytes[Tier.DEVICE]
    assert session.is_loading and reserved == 32 * row

    with pytest.raises(DoesNotFit):
        w.begin([1000 + at for at in range(80)])
    w.check()
    w.read(session, 2)
    assert w.cache.memory.reserved_bytes[Tier.DEVICE] == reserved - 8 * row
    w.read(session)
    assert session.cached == len(LONG) - 1 and w.cache.memory.reserved_bytes[Tier.DEVICE] == 0


@pytest.mark.parametrize("model", MODELS)
def test_clearing_while_a_request_loads_makes_it_compute(model: str) -> None:
    w = on_disk(model)
    session = w.begin(LONG)
    w.cache.upkeep.clear()
    w.check()
    w.read(session)
    session.advance_loading()
    assert not session.is_loading and session.cached == 0
    w.prefill(session)
    w.close(session)
    assert w.cache.count_reusable(LONG) == len(LONG) - 1


@pytest.mark.parametrize("model", MODELS)
def test_a_branch_that_cuts_a_page_which_is_being_read_changes_nothing(model: str) -> None:
    w = on_disk(model, num_lanes=2)
    session = w.begin(LONG)
    w.disk.reader.is_slow = False
    other = w.begin([*LONG[:10], 99, 98])
    w.disk.reader.is_slow = True
    w.read(other)
    w.prefill(other)
    w.close(other)
    w.read(session)
    session.advance_loading()
    assert session.cached == len(LONG) - 1
    w.prefill(session)
    w.close(session)


def test_a_restore_point_that_a_leader_is_asked_for_while_it_loads_is_made() -> None:
    w = on_disk("full+recurrent")
    session = w.begin([*LONG, *OTHER])
    session.schedule(8)  # where the lane will be beyond
    session.schedule(len(LONG) + 5)
    w.read(session)
    w.prefill(session)
    w.close(session)
    points = {at for node in w.cache.forest.tries[""].walk() for at in node.points}
    assert len(LONG) + 5 in points and 8 not in points


@copying_lanes
def test_a_request_that_is_refused_takes_nothing_from_others() -> None:
    row = 8
    w = World(MODELS["full"], 4, num_lanes=2, budget_bytes=120 * row, host_bytes=16 * row)
    w.run(LONG)
    w.run(OTHER)
    before = [(slot.tokens, slot.salt, slot.lane.nbytes) for slot in w.cache.lanes.slots]
    held = tiers(w)
    with pytest.raises(DoesNotFit) as refused:
        w.begin([1000 + at for at in range(121)], salt="other")
    assert refused.value.needed_bytes == 121 * row and refused.value.busy_bytes == 0
    assert [(slot.tokens, slot.salt, slot.lane.nbytes) for slot in w.cache.lanes.slots] == before
    assert tiers(w) == held
    w.check()


def test_loads_that_share_reads_do_not_give_each_other_up() -> None:
    """What one of them has put into the tree counts as arrived for all: a page a second, and 4 s of computing each."""
    w = on_disk(num_lanes=3, rates=FixedRates(token_s=1.0))
    sessions = [w.begin([*LONG, 90 + number]) for number in range(3)]
    for _ in range(8):
        w.wait(1.0)
        assert w.disk.reader.finish(0)
        for session in sessions:
            session.advance_loading()
            w.check()
    assert [session.cached for session in sessions] == [len(LONG)] * 3
    assert w.cache.residency.loader.counts.slow_loads == 0


def test_what_has_been_read_is_never_given_up_however_long_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    w = on_disk(rates=FixedRates(token_s=0.001))
    monkeypatch.setattr(loading, "TAKE_S", -1.0)  # one page at a time
    session = w.begin(LONG)
    while w.disk.reader.finish(0):
        pass
    while session.is_loading:
        w.wait(10.0)  # steps of other requests
        session.advance_loading()
        w.check()
    assert session.cached == len(LONG) - 1


def test_a_load_that_is_given_up_at_once_says_nothing_of_the_disk() -> None:
    w = on_disk()
    rates = w.cache.residency.loader.rates
    rates.note_load(Tier.DISK, 10**9, 1.0)
    rates.note_prefill(0, 100, 0.0001)
    session = w.begin(LONG)
    w.now_s += 1.0  # the disk itself has worked for no time at all
    session.advance_loading()
    assert not session.is_loading and session.cached == 0
    assert rates.byte_s(Tier.DISK) == 1e-9


@pytest.mark.parametrize("model", ["full+recurrent", "window+recurrent+full"])
def test_a_disk_that_delivers_nothing_is_waited_for_once_not_at_every_restore_point(model: str) -> None:
    w = SlowWorld(model, point_spacing=4)
    w.run(LONG, [1])
    w.disk.work()
    demote_all(w)
    session = w.begin(LONG)
    waited = 0
    while session.advance_loading():
        w.wait(1.0)
        waited += 1
    assert session.cached == 0 and waited <= STALLED_S + 2


def test_what_is_promised_to_loads_counts_in_a_salts_share_of_the_device() -> None:
    row = 8
    w = SlowWorld("full", num_lanes=2, budget_bytes=400 * row, salt_share=0.25)
    w.run(LONG)
    w.disk.work()
    demote_all(w)
    w.run([200 + at for at in range(40)])
    room, trie = w.cache.residency.room, w.cache.forest.tries[""]
    session = w.begin(LONG)
    assert session.is_loading and trie.memory.reserved_bytes[Tier.DEVICE] == 32 * row
    held = trie.memory.num_bytes[Tier.DEVICE]

    assert not room.make_room(75 * row, trie=trie)

    assert trie.memory.num_bytes[Tier.DEVICE] == held and room.affordable(trie) <= 68 * row


def test_what_is_read_to_the_device_stays_within_its_salts_share() -> None:
    row = 8
    first = on_disk()
    w = World(MODELS["full"], 4, disk=first.disk.restarted(), budget_bytes=200 * row, salt_share=0.1)

    session = w.begin(LONG)

    assert 0 < session.cached <= 20
    assert w.cache.forest.tries[""].memory.num_bytes[Tier.DEVICE] <= 20 * row
    w.prefill(session)
    w.close(session)


def test_what_has_come_of_large_pages_counts_before_they_are_whole() -> None:
    """After a small page two large ones are half read: the pace of the disk is theirs, not that of the small one."""
    w = SlowWorld("full", num_lanes=2, rates=FixedRates(token_s=0.1))
    w.run([*LONG[:1], 99])
    w.run(LONG)
    w.disk.work()
    demote_all(w)
    session = w.begin(LONG)
    w.read(session, 1)  # the first token alone
    for read in w.disk.reader.taken[:2]:
        read.done_bytes = 16
    w.wait(0.3)
    assert session.advance_loading()
    w.read(session)
    assert session.cached == len(LONG) - 1
