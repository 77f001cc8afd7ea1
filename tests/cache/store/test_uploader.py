"""The uploader: what is sent, once, and never at the cost of a request."""

from __future__ import annotations

import threading

import pytest

from bough.cache.disk.errors import DiskMiss
from bough.cache.store import Section, SharedStore, StoreError
from bough.cache.store import uploader as uploading
from bough.cache.store.format import PAGE_KEY, PREFIX, ListedPoint, decode, read_points
from bough.cache.store.sweeping import LEASE
from bough.cache.store.uploader import SWEEP_EVERY_S, PointList, Upload
from bough.tokens import pack
from tests.fake_store import FINGERPRINT, SECRET, FakeObjects, StepStore, failing, make_owner

TOKENS = pack([1, 2, 3, 4])


def upload(store: SharedStore, page: int = 0, data: bytes | None = b"rows", nbytes: int = 4, salt: str = "") -> Upload:
    path = store.path(salt)
    path.add(TOKENS)
    return Upload(path.rows(page), nbytes, lambda: None if data is None else [Section(0, 0, 2, data)])


def point_list(store: SharedStore, *offsets: int) -> PointList:
    path = store.path("")
    path.add(TOKENS)
    return PointList(path.points(0), {ListedPoint(at): path.point(at) for at in offsets})


def test_an_equal_page_is_sent_once() -> None:
    objects = FakeObjects()
    store = StepStore(objects)
    for _ in range(3):
        store.uploader.offer(upload(store))
        store.work()
    assert objects.calls["put_new"] == 2  # the other is the lease
    assert store.counts.sent == 1 and len(objects.pages) == 1


def test_of_two_writers_one_stores_a_page_and_the_other_counts_it() -> None:
    objects = FakeObjects()
    first, second = StepStore(objects, owner="first"), StepStore(objects, owner="second")

    def overtake(call: str, key: str) -> None:
        """The first writer comes between the second one's look and its write."""
        if call == "put_new" and PAGE_KEY.fullmatch(key):
            objects.fault = lambda call, key: None
            first.uploader.offer(upload(first))
            first.work()

    objects.fault = overtake
    second.uploader.offer(upload(second))
    second.work()
    assert (first.counts.sent, second.counts.sent, second.counts.already_there) == (1, 0, 1)
    assert len(objects.pages) == 1


def test_what_is_too_much_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "MAX_WAITING_BYTES", 10)
    store = StepStore(FakeObjects())
    store.uploader.offer(upload(store, 0, nbytes=8))
    store.uploader.offer(upload(store, 1, nbytes=8))
    store.check()
    assert store.counts.dropped == 1
    store.work()
    store.uploader.offer(upload(store, 1, nbytes=8))
    store.work()
    assert store.counts.sent == 2 and store.uploader.waiting_bytes == 0


def test_what_has_left_memory_is_not_sent() -> None:
    objects = FakeObjects()
    store = StepStore(objects)
    store.uploader.offer(upload(store, data=None))
    store.work()
    assert store.counts.gone == 1 and not objects.pages


def test_an_old_object_is_sent_again_when_it_is_used() -> None:
    wall = [1000.0]
    objects = FakeObjects(lambda: wall[0])
    store = StepStore(objects, ttl_s=3600.0, wall=lambda: wall[0])
    store.uploader.offer(upload(store))
    store.work()
    store.now, wall[0] = 2000.0, 3000.0  # more than half the time to live later
    store.uploader.offer(upload(store))
    store.work()
    assert store.counts.refreshed == 1
    assert objects.objects[objects.pages[0]][1] == 3000.0


def test_after_a_failure_nothing_is_sent_for_a_while_and_then_again() -> None:
    objects = FakeObjects()
    store = StepStore(objects)
    objects.fault = failing("put_new")
    store.uploader.offer(upload(store))
    store.work()
    assert store.counts.errors == 1 and "made to fail" in store.problem
    assert store.is_available  # for reading: it may just be full
    objects.fault = lambda call, key: None
    store.uploader.offer(upload(store, 1))
    store.work()
    assert not objects.pages  # it waits
    store.now += 2
    store.work()
    assert store.counts.sent == 1 and not store.problem


def test_a_list_has_only_points_whose_content_is_there_and_grows() -> None:
    objects = FakeObjects()
    store = StepStore(objects)
    path = store.path("")
    path.add(TOKENS)
    store.uploader.offer(Upload(path.point(1), 4, lambda: [Section(0, 1, 1, b"one")]))
    store.uploader.offer(point_list(store, 1, 2))
    store.work()
    store.uploader.offer(Upload(path.point(2), 4, lambda: [Section(0, 2, 2, b"two")]))
    store.uploader.offer(point_list(store, 2))
    store.work()

    other = StepStore(objects, owner="other")
    reads = other.reader.open_list()
    reads.want([path.points(0)])
    other.reader.wait(1)
    found = reads.find(path.points(0))
    assert found is not None and found.content is not None
    assert [each.offset for each in read_points(path.points(0), found.content)] == [1, 2]


def test_a_store_that_hangs_holds_up_nobody() -> None:
    objects, has_begun, may_go_on = FakeObjects(), threading.Event(), threading.Event()

    def hang(call: str, key: str) -> None:
        if call == "head" and PAGE_KEY.fullmatch(key):
            has_begun.set()
            assert may_go_on.wait(60)

    objects.fault = hang
    store = SharedStore(objects, secret=SECRET, fingerprint=FINGERPRINT, page_tokens=2, owner=make_owner("first"))
    store.uploader.offer(upload(store, 0))
    assert has_begun.wait(60)
    store.uploader.offer(upload(store, 1))  # returns at once
    assert store.uploader.waiting_bytes == 4 and not objects.pages
    may_go_on.set()
    assert store.uploader.settle(60)
    assert len(objects.pages) == 2
    store.close()
    store.close()


def send_points(store: StepStore, *offsets: int) -> None:
    """Send what restore points need, and then their list."""
    path = store.path("")
    path.add(TOKENS)
    for offset in offsets:
        store.uploader.offer(Upload(path.point(offset), 4, lambda: [Section(0, 0, 2, b"what it needs")]))
    store.uploader.offer(point_list(store, *offsets))
    store.work()


def listed(store: StepStore, objects: FakeObjects) -> list[int]:
    """The offsets of the restore points that the store lists for the first page."""
    address = point_list(store).address
    content = objects.objects[store.uploader.key(address)][0]
    return [each.offset for each in read_points(address, decode(store.keys, address, content))]


def test_of_two_that_add_to_a_list_at_once_neither_loses_its_points() -> None:
    objects = FakeObjects()
    first, second, third = (StepStore(objects, 4, owner=owner) for owner in ("first", "second", "third"))
    send_points(first, 1)
    key = first.uploader.key(point_list(first).address)

    def overtake(call: str, at: str) -> None:
        """The third comes between the second one's look and its write."""
        if call in ("put", "replace") and at == key:
            objects.fault = lambda call, key: None
            send_points(third, 3)

    objects.fault = overtake
    send_points(second, 2)
    assert listed(first, objects) == [1, 2, 3]
    assert third.counts.refreshed == second.counts.refreshed == 1


def test_a_list_that_others_write_all_the_time_is_offered_again() -> None:
    objects = FakeObjects()
    first, second = StepStore(objects, 4), StepStore(objects, 4, owner="second")
    send_points(first, 1)
    key = first.uploader.key(point_list(first).address)

    def touch(call: str, at: str) -> None:
        if call == "replace" and at == key:
            objects.put(key, objects.objects[key][0])

    objects.fault = touch
    send_points(second, 2)
    assert listed(first, objects) == [1]
    objects.fault = lambda call, key: None
    send_points(second, 2)
    assert listed(first, objects) == [1, 2]


def test_what_turns_out_to_be_gone_is_sent_again() -> None:
    objects = FakeObjects()
    store = StepStore(objects)
    store.uploader.offer(upload(store))
    store.work()
    objects.delete(objects.pages)  # another machine's sweep
    with pytest.raises(DiskMiss, match="missing"):
        store.read(upload(store).address, lambda nbytes: True)
    store.uploader.offer(upload(store))
    store.work()
    assert len(objects.pages) == 1


def test_nothing_is_sent_before_it_is_known_what_others_have_cleared() -> None:
    objects = FakeObjects()
    first, second = StepStore(objects), StepStore(objects, owner="second")
    second.clear("")()
    objects.fault = failing("list")
    first.uploader.offer(upload(first, 0))
    first.work()
    first.now += 2
    objects.fault = lambda call, key: None
    first.uploader.offer(upload(first, 1))
    first.work()
    assert not objects.pages and first.counts.refused > 0


def test_a_machine_that_always_has_something_to_send_sweeps_all_the_same() -> None:
    objects = FakeObjects()
    store = StepStore(objects, budget_bytes=0)
    store.work()
    store.now += SWEEP_EVERY_S
    for page in range(5):
        store.uploader.offer(upload(store, page % 2, salt=str(page)))
        store.uploader.offer(upload(store, page % 2, salt=f"and {page}"))
        assert store.uploader.work() and store.uploader.waiting_bytes
    assert not store.counts.swept
    store.now += SWEEP_EVERY_S
    assert store.uploader.work() and store.uploader.waiting_bytes
    assert store.counts.swept > 0


def test_a_machine_whose_clock_is_ahead_sweeps_nothing_before_its_time() -> None:
    objects = FakeObjects(lambda: 1000.0)
    store = StepStore(objects, ttl_s=600.0, wall=lambda: 1000.0 + 3600.0)
    store.uploader.offer(upload(store))
    store.work()
    store.now += SWEEP_EVERY_S
    store.work()
    assert len(objects.pages) == 1 and LEASE in objects.objects


def test_a_clear_that_fails_by_a_mistake_is_no_success() -> None:
    objects = FakeObjects()
    store = StepStore(objects)

    def fault(call: str, key: str) -> None:
        if call == "list":
            raise RuntimeError("a mistake")

    objects.fault = fault
    with pytest.raises(StoreError, match="may still have what was to be cleared: a mistake"):
        store.clear("")()


def test_lists_that_wait_are_counted_by_what_they_take() -> None:
    store = StepStore(FakeObjects(), 4)
    store.uploader.offer(point_list(store, 1, 2, 3))
    assert store.uploader.waiting_bytes > 500
    store.check()


def test_what_was_being_sent_while_it_was_cleared_is_sent_again_when_it_is_computed_again() -> None:
    objects = FakeObjects()
    store = StepStore(objects)

    def clear(call: str, key: str) -> None:
        if call == "put_new" and PAGE_KEY.fullmatch(key):
            objects.fault = lambda call, key: None
            store.clear("")

    objects.fault = clear
    store.uploader.offer(upload(store))
    store.work()
    assert not objects.pages
    store.uploader.offer(upload(store))
    store.work()
    assert len(objects.pages) == 1


def test_a_sweep_under_way_is_nothing_that_waits_to_be_sent() -> None:
    objects, has_begun, may_go_on = FakeObjects(), threading.Event(), threading.Event()

    def hang(call: str, key: str) -> None:
        if call == "list" and key == PREFIX:
            has_begun.set()
            assert may_go_on.wait(60)

    objects.fault = hang
    store = SharedStore(objects, secret=SECRET, fingerprint=FINGERPRINT, page_tokens=2, owner=make_owner("first"))
    assert has_begun.wait(60)
    assert store.uploader.settle(0.2)
    may_go_on.set()
    store.close()
