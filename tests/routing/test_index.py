"""The page index against a plain model: any sequence of messages, with losses, repeats, restarts and listings."""

from __future__ import annotations

import random

import pytest

from bough.cache.tree.state import Tier
from bough.routing.index import PageIndex, key_of
from bough.routing.page_reports import (
    INTERVAL_S,
    MOST_CHANGES,
    TIERS,
    Outbox,
    PageMessage,
    PageNote,
    encode_note,
    unpack_message,
)

NOTES = [PageNote(tier, stands) for tier in TIERS for stands in (True, False)]
DEVICE, DISK = PageNote(Tier.DEVICE), PageNote(Tier.DISK)


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def note_of(index: PageIndex, replica: str, page: bytes) -> PageNote | None:
    """What the index knows of one page at one replica."""
    runs = index.match([key_of(page)], {}).get(replica)
    return None if runs is None else {encode_note(note): note for note in NOTES}[runs[0].code]


class ToldReplica:
    """A replica, and what a router that heard every delivered message must know of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.pages: dict[bytes, PageNote] = {}
        self.believed: dict[bytes, PageNote] = {}
        self.restart({})

    def restart(self, pages: dict[bytes, PageNote]) -> None:
        self.incarnation += 1
        self.pages = pages
        self.outbox = Outbox(self.name, self.incarnation)
        for each, note in pages.items():
            self.outbox.note(each, note, 0.0)

    def change(self, chance: random.Random, digests: list[bytes]) -> None:
        for each in chance.sample(digests, chance.randrange(1, 6)):
            note = chance.choice([None, *NOTES])
            self.outbox.note(each, note, 0.0)
            if note is None:
                self.pages.pop(each, None)
            else:
                self.pages[each] = note


def deliver(index: PageIndex, replica: ToldReplica, message: PageMessage, known: dict[str, tuple[int, int]]) -> None:
    """Deliver a message to the index and, by its plain meaning, to the model."""
    sent, last = (message.incarnation, message.sequence), known.get(replica.name, (0, 0))
    needs_listing = index.apply(message)
    if message.is_listing:
        if sent >= last:
            replica.believed, known[replica.name] = dict(message.notes), sent
        assert not needs_listing
        return
    if sent <= last:
        assert not needs_listing
        return
    if message.incarnation > last[0]:
        replica.believed = {}
        assert needs_listing
    elif message.sequence > last[1] + 1:
        assert needs_listing
    known[replica.name] = sent
    for each, note in message.notes.items():
        replica.believed.pop(each, None)
        if note is not None:
            replica.believed[each] = note


@pytest.mark.parametrize("seed", range(12))
def test_the_index_equals_a_plain_model_after_any_messages(seed: int) -> None:
    chance = random.Random(seed)
    digests = [digest(number) for number in range(40)]
    replicas = [ToldReplica(f"r{number}") for number in range(5)]
    index, known, late = PageIndex(), dict[str, tuple[int, int]](), list[tuple[ToldReplica, PageMessage]]()
    for replica in replicas:
        index.join(replica.name)
    for _ in range(400):
        replica = chance.choice(replicas)
        replica.change(chance, digests)
        what = chance.random()
        if what < 0.05:
            replica.restart(dict(chance.sample(sorted(replica.pages.items(), key=str), len(replica.pages) // 2)))
        elif what < 0.5:
            deliver(index, replica, replica.outbox.take(), known)
        elif what < 0.6:
            replica.outbox.take()  # lost
        elif what < 0.7:
            late.append((replica, replica.outbox.take()))
        elif what < 0.8 and late:
            deliver(index, *late.pop(chance.randrange(len(late))), known)
        elif what < 0.9:
            deliver(index, replica, replica.outbox.list_all(), known)
        elif what < 0.92:
            index.forget(replica.name)
            index.join(replica.name)
            replica.believed = {}
            known.pop(replica.name, None)
        index.sweep(chance.randrange(8))
        index.check()
        assert {(r.name, d): note_of(index, r.name, d) for r in replicas for d in digests} == {
            (r.name, d): r.believed.get(d) for r in replicas for d in digests
        }
    for replica in replicas:  # a listing after all makes everything right
        deliver(index, replica, replica.outbox.take(), known)
        deliver(index, replica, replica.outbox.list_all(), known)
        assert replica.believed == replica.pages
    assert not any(known.needs_listing for known in index.replicas.values())
    while not index.sweep(1000):
        pass
    index.check()
    assert index.num_keys == len({d for r in replicas for d in r.pages})
    assert index.num_pages == sum(len(r.pages) for r in replicas)


def test_a_gap_in_the_numbers_asks_for_a_listing_and_is_applied_meanwhile() -> None:
    index = PageIndex()
    index.join("a")
    index.apply(PageMessage("a", 1, 0, {}, is_listing=True))
    assert not index.apply(PageMessage("a", 1, 1, {digest(1): DEVICE}))
    assert index.apply(PageMessage("a", 1, 3, {digest(3): DEVICE}))
    assert note_of(index, "a", digest(3)) == DEVICE
    assert index.apply(PageMessage("a", 1, 4, {}))  # until it comes
    index.apply(PageMessage("a", 1, 4, {digest(2): DISK, digest(3): DEVICE}, is_listing=True))
    assert not any(known.needs_listing for known in index.replicas.values())
    assert [note_of(index, "a", digest(number)) for number in (1, 2, 3)] == [None, DISK, DEVICE]


def test_messages_of_a_replica_that_is_gone_are_not_taken_up() -> None:
    index = PageIndex()
    index.join("a")
    index.apply(PageMessage("a", 1, 1, {digest(1): DEVICE}))
    index.forget("a")
    assert not index.apply(PageMessage("a", 1, 2, {digest(2): DEVICE}))
    assert not index.apply(PageMessage("a", 1, 2, {digest(2): DEVICE}, is_listing=True))
    index.sweep(10)
    index.check()
    assert index.num_keys == 0


def test_a_match_ends_at_the_first_page_that_a_replica_lacks() -> None:
    index = PageIndex()
    for name, pages in {"a": {0: DEVICE, 1: DEVICE, 2: DISK, 4: DEVICE}, "b": {1: DEVICE}, "c": {0: DISK}}.items():
        index.join(name)
        index.apply(PageMessage(name, 1, 0, {digest(number): note for number, note in pages.items()}, is_listing=True))
    found = index.match([key_of(digest(number)) for number in range(6)], {})
    assert {name: [run.end for run in runs] for name, runs in found.items()} == {"a": [2, 3], "c": [1]}


def test_a_retired_slot_is_used_again_after_a_sweep() -> None:
    index = PageIndex()
    for number in range(300):
        index.join("a")
        index.apply(PageMessage("a", number + 1, 0, {digest(each): DEVICE for each in range(5)}, is_listing=True))
        index.check()
    assert index.replicas["a"].slot < 3


def test_messages_come_back_from_bytes_as_they_were() -> None:
    changes = {digest(number): note for number, note in enumerate([None, *NOTES])}
    batch = PageMessage("replica-3", 7, 12, changes)
    assert unpack_message(batch.pack()) == batch
    listing = PageMessage("ü", 7, 12, {each: note for each, note in changes.items() if note is not None}, is_listing=True)
    assert unpack_message(listing.pack()) == listing
    assert (
        len(PageMessage("r", 1, 2, dict.fromkeys(map(digest, range(100)))).pack()) - len(PageMessage("r", 1, 2, {}).pack())
        == 1700
    )


@pytest.mark.parametrize("data", [b"", b"\1" * 30, PageMessage("a", 1, 1, {digest(1): DEVICE}).pack()[:-1]])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(data)} bytes"):
        unpack_message(data)


def test_an_outbox_is_due_after_a_while_or_when_much_has_changed() -> None:
    outbox = Outbox("a", 1)
    assert not outbox.is_due(100.0)
    outbox.note(digest(0), DEVICE, now=1.0)
    assert not outbox.is_due(1.0)
    assert outbox.is_due(1.0 + INTERVAL_S)
    for number in range(1, MOST_CHANGES):
        outbox.note(number.to_bytes(16, "little"), DEVICE, now=1.0)
    assert outbox.is_due(1.0)


def test_a_page_that_came_and_went_between_two_batches_is_not_told() -> None:
    outbox = Outbox("a", 1)
    outbox.note(digest(0), DEVICE, 0.0)
    outbox.note(digest(0), None, 0.0)
    outbox.note(digest(1), DEVICE, 0.0)
    outbox.note(digest(1), DISK, 0.0)
    assert outbox.take().notes == {digest(1): DISK}
    assert outbox.take() == PageMessage("a", 1, 2, {})
