"""The uploader: what is sent, once, and never at the cost of a request."""

from __future__ import annotations

import threading

import pytest

from bough.cache.store import Section, SharedStore
from bough.cache.store import uploader as uploading
from bough.cache.store.format import ListedPoint
from bough.cache.store.uploader import PointList, Upload
from bough.cache.tree.tokens import pack
from tests.fake_store import FINGERPRINT, SECRET, FakeObjects, StepStore, failing

TOKENS = pack([1, 2, 3, 4])


def upload(store: SharedStore, page: int = 0, data: bytes | None = b"rows", nbytes: int = 4) -> Upload:
    path = store.path("")
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
        if call == "put_new" and not key.startswith("_"):
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
    from bough.cache.store.format import read_points

    assert [each.offset for each in read_points(path.points(0), found.content)] == [1, 2]


def test_a_store_that_hangs_holds_up_nobody() -> None:
    objects, has_begun, may_go_on = FakeObjects(), threading.Event(), threading.Event()

    def hang(call: str, key: str) -> None:
        if call == "head":
            has_begun.set()
            assert may_go_on.wait(60)

    objects.fault = hang
    store = SharedStore(objects, secret=SECRET, fingerprint=FINGERPRINT, page_tokens=2, owner="first")
    store.uploader.offer(upload(store, 0))
    assert has_begun.wait(60)
    store.uploader.offer(upload(store, 1))  # returns at once
    assert store.uploader.waiting_bytes == 4 and not objects.pages
    may_go_on.set()
    assert store.uploader.settle(60)
    assert len(objects.pages) == 2
    store.close()
    store.close()
