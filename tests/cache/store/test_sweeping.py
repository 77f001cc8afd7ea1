"""Sweeping: one machine at a time deletes what was cleared, what is old, and the oldest beyond the budget."""

from __future__ import annotations

from functools import partial

from bough.cache.store.format import DELETED, LEASE, PREFIX
from bough.cache.store.sweeping import DELETED_S, LEASE_S, LOOK_EVERY_S, Deletions, clear_model, sweep, take_lease
from tests.fake_store import FINGERPRINT, FakeObjects, make_owner

HUGE = b'{"owner": "x", "expires": 1' + b"0" * 400 + b"}"
ROOT, OTHER = bytes(16), bytes(15) + b"1"
FIRST, SECOND = make_owner("first"), make_owner("second")


class Wall:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def page_key(page: int, root: bytes = ROOT, model: str = FINGERPRINT) -> str:
    return f"{PREFIX}{model}/{root.hex()}/{page:032x}"


def filled(wall: Wall, number: int) -> FakeObjects:
    """Objects of 10 bytes each, written one second after the other."""
    objects = FakeObjects(wall)
    for page in range(number):
        objects.put(page_key(page), bytes(10))
        wall.now += 1
    return objects


def test_one_machine_has_the_lease_until_it_ends() -> None:
    wall = Wall()
    objects = FakeObjects(wall)
    first, second = partial(take_lease, objects, "first"), partial(take_lease, objects, "second")
    assert first(wall.now) and not second(wall.now) and first(wall.now)
    wall.now += LEASE_S + 1
    assert second(wall.now) and not first(wall.now)


def test_of_two_that_take_an_expired_lease_at_once_one_gets_it() -> None:
    wall = Wall()
    objects = FakeObjects(wall)
    assert take_lease(objects, "gone", wall.now)
    wall.now += LEASE_S + 1
    taken = []

    def overtake(call: str, key: str) -> None:
        if call == "replace":
            objects.fault = lambda call, key: None
            taken.append(take_lease(objects, "first", wall.now))

    objects.fault = overtake
    assert not take_lease(objects, "second", wall.now) and taken == [True]


def test_a_damaged_lease_is_replaced() -> None:
    wall = Wall()
    objects = FakeObjects(wall)
    for content in (b"", b"\xff", b"[]", b'{"owner": "x"}', b'{"owner": "x", "expires": "never"}', HUGE):
        objects.put(LEASE, content)
        assert take_lease(objects, "first", wall.now)


def test_the_oldest_goes_until_the_rest_is_within_the_budget() -> None:
    wall = Wall()
    objects = filled(wall, 5)
    objects.put(LEASE, b"not counted")
    swept = sweep(objects, wall.now, 30, None)
    assert (swept.held_bytes, swept.num_deleted, swept.deleted_bytes) == (30, 2, 20)
    assert sorted(objects.pages) == [page_key(page) for page in (2, 3, 4)]


def test_what_was_not_written_for_the_time_to_live_goes() -> None:
    wall = Wall()
    objects = filled(wall, 4)
    sweep(objects, wall.now, None, 2.5)
    assert len(objects.pages) == 2


def test_what_was_cleared_goes_and_stays_listed_for_a_while() -> None:
    wall = Wall()
    objects = filled(wall, 1)
    objects.put(page_key(0, OTHER), b"kept")
    objects.put(page_key(0, ROOT, "beef" * 16), b"kept")
    first, second = (Deletions(objects, FINGERPRINT, owner, wall) for owner in (FIRST, SECOND))
    wall.now += 100
    first.note(ROOT)
    wall.now += LOOK_EVERY_S + 20
    objects.put(page_key(1), b"began to be sent before its machine looked")
    sweep(objects, wall.now, None, None)
    assert len(objects.pages) == 2 and all(objects.objects[key][0] == b"kept" for key in objects.pages)

    first.look()
    second.look()
    assert second.forbids(ROOT) and not second.forbids(OTHER) and not first.forbids(ROOT)
    wall.now += DELETED_S + 1
    assert not second.forbids(ROOT)
    sweep(objects, wall.now, None, None)
    assert not any(key.startswith(DELETED) for key in objects.objects)


def test_clearing_a_whole_model_forbids_all_its_roots() -> None:
    wall = Wall()
    objects = filled(wall, 2)
    Deletions(objects, FINGERPRINT, FIRST, wall).note(None)
    second = Deletions(objects, FINGERPRINT, SECOND, wall)
    second.look()
    assert second.forbids(ROOT) and second.forbids(OTHER)
    sweep(objects, wall.now, None, None)
    assert not objects.pages


FOREIGN = [
    "photo.jpg",
    "_deleted/2025/report.pdf",
    f"photos/{bytes(16).hex()}/{bytes(16).hex()}",
    f"a/b/{page_key(7)}",
    page_key(7).removeprefix(PREFIX),
    f"{PREFIX}{FINGERPRINT}/{ROOT.hex()}/notes",
    f"{PREFIX}{FINGERPRINT}/{ROOT.hex()}/{7:033x}",
    f"{PREFIX}{FINGERPRINT[1:]}/{ROOT.hex()}/{7:032x}",
    f"{DELETED}2025/report.pdf",
    f"{DELETED}{FINGERPRINT}/all/report.pdf",
]
"""Nearly our names, and names that a sweep before `bough-state/` took for ours."""


def test_what_is_not_ours_is_neither_counted_nor_deleted_by_a_sweep() -> None:
    wall = Wall()
    objects = filled(wall, 2)
    for key in FOREIGN:
        objects.put(key, bytes(100))
    Deletions(objects, FINGERPRINT, FIRST, wall).note(None)
    wall.now += 10_000
    assert sweep(objects, wall.now, 0, 1.0).deleted_bytes == 20
    assert sorted(objects.objects) == sorted(FOREIGN)


def test_clearing_a_model_deletes_nothing_that_is_not_ours() -> None:
    wall = Wall()
    objects = filled(wall, 2)
    for key in FOREIGN:
        objects.put(key, bytes(100))
    clear_model(objects, FINGERPRINT, FIRST, wall)
    assert sorted(objects.objects) == sorted([*FOREIGN, f"{DELETED}{FINGERPRINT}/all/{FIRST}"])
