"""Saving while a conversation grows: a chunk hashes what is new, and whatever lost its file is saved at the end."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from bough.cache.residency.memory import own_file
from bough.cache.residency.node_paths import PathAddresses
from bough.cache.session import Session
from bough.cache.tree.address import PageBorder
from bough.cache.tree.state import Kind, Page, Tier
from bough.tokens import cut, pack
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World

PAGE = 4
WITH_ROWS = [name for name, groups in MODELS.items() if any(group.kind is Kind.FULL for group in groups)]


class CountingDisk(FakeDisk):
    """A disk that counts the pages that were hashed."""

    num_hashed = 0

    @property
    def keys(self) -> SimpleNamespace:
        return SimpleNamespace(after=self._after)

    def _after(self, digest: bytes, block: bytes) -> bytes:
        self.num_hashed += 1
        hashed: bytes = super().keys.after(digest, block)
        return hashed


def check_addresses(w: World, disk: FakeDisk) -> int:
    """Every file of a page or state has the address that its whole path gives; returns how many there are."""
    checked = 0
    for trie in w.cache.forest.tries.values():
        for node in trie.walk():
            addresses = PathAddresses.of(disk, trie, node)  # type: ignore[arg-type]
            for item in node.items():
                if (file := own_file(item)) is not None:
                    assert file.address == addresses.address(item)
                    checked += 1
    return checked


def unsaved_rows(session: Session) -> list[tuple[int, int]]:
    """The rows of full attention on a session's path that have no file of their own."""
    items = [item for node in session.sequence.hold.node.path() for item in node.items()]
    return [item.span for item in items if isinstance(item, Page) and item.group.kind is Kind.FULL and not own_file(item)]


@pytest.mark.parametrize("seed", range(20))
def test_addresses_that_follow_a_border_are_those_of_the_whole_path(seed: int) -> None:
    chance, disk, w = random.Random(seed), FakeDisk(PAGE), World(MODELS["full"], PAGE)
    trie = w.cache.forest.open("")
    node = trie.root
    tokens = [chance.randrange(50) for _ in range(chance.randrange(1, 60))]
    while node.end < len(tokens):
        node = trie.append(node, tokens[node.end : node.end + chance.randrange(1, 20)])
    whole, border = PathAddresses.of(disk, trie, node), PageBorder(0, disk.digests(trie.root_id, b"")[0])  # type: ignore[arg-type]
    while border.offset < len(tokens):
        end = min(len(tokens), border.offset + chance.randrange(1, 16))
        part = PathAddresses.following(disk, trie, border, cut(pack(tokens), border.offset, end))  # type: ignore[arg-type]
        for page in range(border.offset // PAGE, -(-end // PAGE)):
            low = chance.randrange(page * PAGE, min(end, (page + 1) * PAGE))
            high = chance.randrange(low + 1, min(end, (page + 1) * PAGE) + 1)
            made = Page(w.engine.groups[0], low, high, None, 0)
            assert part.address(made) == whole.address(made)
        if end == len(tokens):
            break
        border = part.last_border


@pytest.mark.parametrize("model", WITH_ROWS)
@pytest.mark.parametrize("seed", range(4))
def test_files_of_growing_and_parting_conversations_have_the_addresses_of_their_paths(model: str, seed: int) -> None:
    chance, disk, checked = random.Random(seed), FakeDisk(PAGE), 0
    w = World(MODELS[model], PAGE, num_lanes=3, disk=disk)
    chats = [[chance.randrange(3) for _ in range(30)]]
    for _ in range(12):
        chat = chance.choice(chats)
        chats.append([*chat[: chance.randrange(1, len(chat) + 1)], *(chance.randrange(3) for _ in range(20))])
        sessions = [w.begin(chance.choice(chats[-3:])) for _ in range(3)]
        while sum(w.prefill_chunk(session, chance.randrange(1, 12)) for session in sessions):
            checked += check_addresses(w, disk)
            if chance.random() < 0.5:
                disk.work()
        for session in sessions:
            w.close(session)
        check_addresses(w, disk)
    assert checked > 0


def test_a_chunk_hashes_the_pages_that_it_fills() -> None:
    disk = CountingDisk(PAGE)
    w = World(MODELS["full"], PAGE, disk=disk)
    session = w.begin(range(2, 202))
    for _ in range(20):
        before, disk.num_hashed = len(disk.live), 0
        w.prefill_chunk(session, 2 * PAGE)
        assert disk.num_hashed == 2
        assert len(disk.live) == before + 2


def test_the_next_turn_of_a_saved_conversation_hashes_what_it_adds() -> None:
    disk = CountingDisk(PAGE)
    w = World(MODELS["full"], PAGE, disk=disk)
    w.run(range(2, 100))
    disk.work()
    session = w.begin(range(2, 130))
    assert session.cached == 98

    disk.num_hashed = 0
    w.prefill_chunk(session, 10)

    assert session.sequence.saved_to is not None and session.sequence.saved_to.offset == 108
    assert disk.num_hashed == 3  # the page that was not full, and two more


def fail_a_write(w: World, disk: FakeDisk) -> None:
    disk.fail_next = "write"
    disk.work()


def evict_a_file(w: World, disk: FakeDisk) -> None:
    disk.work()
    assert w.cache.residency.evictor.evict_one(Tier.DISK)


def lose_all(w: World, disk: FakeDisk) -> None:
    disk.clear()


@pytest.mark.parametrize("spoil", [fail_a_write, evict_a_file, lose_all])
@pytest.mark.parametrize("model", WITH_ROWS)
def test_what_lost_its_file_while_the_request_ran_is_saved_when_it_ends(model: str, spoil: object) -> None:
    assert callable(spoil)
    disk, prompt = FakeDisk(PAGE), list(range(2, 42))
    w = World(MODELS[model], PAGE, disk=disk, chunk=8)
    session = w.begin(prompt)
    w.prefill_chunk(session)
    w.prefill_chunk(session)
    spoil(w, disk)
    assert unsaved_rows(session)
    w.prefill(session)
    assert unsaved_rows(session)  # a chunk does not look back

    w.close(session)
    disk.work()

    assert World(MODELS[model], PAGE, disk=disk.restarted()).cache.count_reusable(prompt) == len(prompt) - 1


@pytest.mark.parametrize("model", WITH_ROWS)
def test_what_a_full_disk_did_not_take_is_saved_when_the_request_ends(model: str) -> None:
    disk, prompt = FakeDisk(PAGE), list(range(2, 42))
    w = World(MODELS[model], PAGE, disk=disk, chunk=8)
    session = w.begin(prompt)
    disk.is_full = True
    w.prefill_chunk(session)
    disk.is_full = False
    w.prefill(session)

    w.close(session)
    disk.work()

    assert World(MODELS[model], PAGE, disk=disk.restarted()).cache.count_reusable(prompt) == len(prompt) - 1


def test_a_request_that_starts_again_saves_at_its_end_what_it_had_recorded() -> None:
    disk, prompt = FakeDisk(PAGE), list(range(2, 42))
    w = World(MODELS["full"], PAGE, disk=disk, chunk=8)
    session = w.begin(prompt)
    w.prefill_chunk(session)
    fail_a_write(w, disk)
    w.prefill(session)
    session.restart()
    with session.feeding(prompt):
        w.engine.evaluate(session.lane, prompt)

    w.close(session)
    disk.work()

    assert World(MODELS["full"], PAGE, disk=disk.restarted()).cache.count_reusable(prompt) == len(prompt) - 1
