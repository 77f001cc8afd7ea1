"""What goes to disk comes back, also after a restart, and is counted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bough.cache.disk import Disk, DiskMiss, page_files
from bough.cache.disk.index import INDEX, Identity, Index, IndexChanges
from bough.cache.disk.keys import PageKeys
from bough.cache.tree.address import Address, DiskFile
from bough.tokens import pack
from tests.cache.disk.shelf import (
    CONTENT_BYTES,
    Shelf,
    address_of,
    content_of,
    get,
    held_writer,
    point_of,
    put,
    put_path,
    put_point,
    save,
)
from tests.waiting import BOUND_S


def test_what_was_put_can_be_got_and_is_counted(disk: Disk, shelf: Shelf) -> None:
    disk_file = put(disk, address_of(disk, [1, 2, 3, 4], 0))
    assert disk.flush(10)

    assert disk_file.is_saved and not disk_file.has_failed and disk_file.num_users == 1
    assert get(disk, disk_file) == content_of(disk_file.address)
    assert isinstance(get(disk, disk_file), bytearray)
    assert (disk.counts.saved, disk.counts.saved_bytes) == (1, disk_file.nbytes)
    assert (disk.counts.loaded, disk.counts.loaded_bytes) == (2, 2 * disk_file.nbytes)
    assert disk.used_bytes == disk.claimed_bytes == disk_file.nbytes == shelf.page_bytes()
    assert (disk.num_files, disk.pending_bytes) == (1, 0)


def test_a_restart_finds_equal_copies_prefixes_before_what_follows(shelf: Shelf) -> None:
    tokens = list(range(10))
    with shelf.open() as disk:
        put_path(disk, tokens)
        put(disk, address_of(disk, tokens[:8], 8, group=1), last_used=7.0)
        assert disk.flush(10)
        before = {disk_file.address: (disk_file.nbytes, disk_file.last_used) for disk_file in disk.files()}

    with shelf.open() as disk:
        files = disk.files()
        assert {disk_file.address: (disk_file.nbytes, disk_file.last_used) for disk_file in files} == before
        assert [(disk_file.address.start, disk_file.address.end) for disk_file in files] == [
            (0, 4),
            (4, 8),
            (8, 8),
            (8, 10),
        ]
        assert all(disk_file.is_saved and disk_file.num_users == 0 for disk_file in files)
        assert [bytes(get(disk, disk_file)) for disk_file in files] == [
            content_of(disk_file.address) for disk_file in files
        ]
        assert disk.claimed_bytes == disk.used_bytes == shelf.page_bytes()


def test_closing_saves_what_is_queued_and_can_be_done_twice(shelf: Shelf) -> None:
    disk = shelf.open()
    files = put_path(disk, range(40))
    disk.close()
    disk.close()

    assert all(disk_file.is_saved for disk_file in files)
    assert put(disk, files[0].address).num_users == 2  # still known
    assert put(disk, Address(b"r", b"b", b"", 0, 0, 1)).has_failed  # but nothing new is taken
    with shelf.open() as again:
        assert len(again.files()) == 10


def test_files_and_folders_are_private_whatever_the_umask_says(shelf: Shelf) -> None:
    shelf.folder.mkdir(parents=True, mode=0o755)
    old = os.umask(0)
    try:
        with shelf.open() as disk:
            put_path(disk, range(8))
            assert disk.flush(10)
            entries = [shelf.folder, *shelf.folder.rglob("*")]
            modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in entries}
            expected = {entry.name: 0o700 if entry.is_dir() else 0o600 for entry in entries}
    finally:
        os.umask(old)
    assert modes == expected
    assert {"lock", "secret", INDEX, f"{INDEX}-wal"} <= modes.keys()


def test_digests_chain_page_by_page(disk: Disk) -> None:
    root = disk.root("")
    digests = disk.digests(root, pack(range(10)))

    assert len(digests) == 3
    assert all(len(digest) == 16 for digest in digests)
    assert disk.digests(root, pack(range(8))) == digests
    assert disk.digests(root, pack([0, 1, 2, 3, 4, 5, 6, 9]))[:2] == digests[:2]
    assert disk.digests(root, pack([0, 1, 2, 3, 4, 5, 6, 9]))[2] != digests[2]
    assert disk.digests(disk.root("other"), b"") != digests[:1]


def test_salts_are_apart_and_never_written(disk: Disk, shelf: Shelf) -> None:
    salt = "tenant-seventeen"
    ours = put(disk, address_of(disk, [1, 2], 0, salt=salt))
    theirs = put(disk, address_of(disk, [1, 2], 0, salt="other"))
    assert disk.flush(10)

    assert ours is not theirs
    assert len(shelf.page_files()) == 2
    assert not any(salt.encode() in file.read_bytes() for file in shelf.folder.rglob("*") if file.is_file())


def test_two_stores_have_different_secrets_and_names(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a").open() as one, Shelf(tmp_path / "b").open() as other:
        assert one.root("") != other.root("")
        root = bytes(16)
        assert one.digests(root, b"") != other.digests(root, b"")
        assert len((tmp_path / "a" / "secret").read_bytes()) == 32


def test_an_address_that_is_there_is_not_written_again(disk: Disk) -> None:
    disk_file = put(disk, address_of(disk, [1, 2], 0))
    assert disk.flush(10)

    again = disk.put(disk_file.address, lambda: pytest.fail("it is there already"), CONTENT_BYTES)

    assert again is disk_file and disk_file.num_users == 2
    assert disk.flush(10)
    assert disk.counts.saved == 1


def test_a_copy_goes_with_its_last_user(disk: Disk, shelf: Shelf) -> None:
    disk_file = put(disk, address_of(disk, [1, 2], 0))
    assert disk.flush(10)
    assert put(disk, disk_file.address) is disk_file  # a second user

    disk.drop(disk_file)
    assert disk.flush(10)
    assert len(shelf.page_files()) == 1

    disk.drop(disk_file)
    assert disk.claimed_bytes == 0  # at once
    assert disk.flush(10)
    assert shelf.page_files() == [] and disk.used_bytes == 0
    assert disk.counts.dropped == 1


def test_a_copy_from_an_earlier_run_can_be_dropped_without_being_used(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put(disk, address_of(disk, [1, 2], 0))
    with shelf.open() as disk:
        disk.drop(disk.files()[0])
    with shelf.open() as disk:
        assert disk.files() == [] and disk.flush(10) and shelf.page_files() == []


def test_dropping_a_pending_copy_cancels_its_write(disk: Disk, shelf: Shelf) -> None:
    with held_writer(disk):
        disk_file = disk.put(address_of(disk, [1], 0), lambda: pytest.fail("it was cancelled"), CONTENT_BYTES)
        disk.drop(disk_file)
        assert disk.num_files == 1 and disk.pending_bytes == disk.claimed_bytes
    assert disk.flush(10)
    assert len(shelf.page_files()) == 1 and not disk_file.is_saved


def test_dropping_a_copy_while_it_is_written_leaves_no_file(disk: Disk, shelf: Shelf) -> None:
    with held_writer(disk) as held:
        disk.drop(held[0])
    assert disk.flush(10)
    assert shelf.page_files() == [] and not held[0].is_saved


def test_what_is_dropped_and_put_again_at_once_is_there(disk: Disk) -> None:
    disk_file = put(disk, address_of(disk, [1, 2], 0))
    assert disk.flush(10)
    with held_writer(disk):
        disk.drop(disk_file)
        again = put(disk, disk_file.address)
    assert disk.flush(10)

    assert again.is_saved and again.num_users == 1
    assert get(disk, again) == content_of(disk_file.address)


def test_content_that_is_gone_makes_no_copy_and_is_no_failure(disk: Disk) -> None:
    part = put(disk, address_of(disk, [1, 2], 0))
    gone = disk.put(address_of(disk, [1, 2, 3, 4], 0), lambda: None, CONTENT_BYTES)
    assert disk.flush(10)

    assert gone.has_failed and not gone.is_saved and disk.counts.failed_writes == 0
    assert disk.files() == [part] and part.num_users == 1


def test_what_is_prioritized_is_written_before_all_that_waits(disk: Disk) -> None:
    order: list[int] = []

    def read(number: int) -> bytes:
        order.append(number)
        return b"x"

    with held_writer(disk):
        files = [disk.put(address_of(disk, [n], 0), lambda n=n: read(n), 1) for n in range(50)]
        disk.prioritize(files[-1])

    assert save(disk, files[-1])
    assert order[0] == 49
    assert disk.flush(10)
    assert sorted(order) == list(range(50))


def test_a_file_that_cannot_be_saved_has_failed(disk: Disk) -> None:
    gone = disk.put(address_of(disk, [1], 0), lambda: None, 1)
    assert not save(disk, gone)
    saved = put(disk, address_of(disk, [2], 0))
    assert save(disk, saved) and save(disk, saved)
    disk.drop(saved)
    disk.flush(10)
    with pytest.raises(DiskMiss, match="missing"):
        get(disk, gone)


def test_points_are_kept_changed_and_dropped(shelf: Shelf) -> None:
    with shelf.open() as disk:
        one, other = point_of(disk, [1, 2]), point_of(disk, [1, 2, 3, 4, 5])
        put_point(disk, other, reason=1, is_kept=False, is_superseded=False, last_used=1.0)
        put_point(disk, one, reason=2, is_kept=True, is_superseded=False, last_used=2.0)
        assert disk.flush(10)
        put_point(disk, one, reason=2, is_kept=True, is_superseded=True, last_used=3.0)
        noted = disk.points()
    with shelf.open() as disk:
        assert disk.points() == noted
        assert [(record.address, record.is_superseded) for record in noted] == [(one, True), (other, False)]
        assert (noted[0].reason, noted[0].is_kept, noted[0].last_used) == (2, True, 3.0)
        disk.drop_point(one)
        disk.drop_point(one)
    with shelf.open() as disk:
        assert [record.address for record in disk.points()] == [other]


def test_recency_is_noted_at_once_and_survives(shelf: Shelf) -> None:
    with shelf.open() as disk:
        files = put_path(disk, range(8))
        assert disk.flush(10)
        disk.touch(files[:1], 50.0)
        assert files[0].last_used == 50.0
    with shelf.open() as disk:
        assert [disk_file.last_used for disk_file in disk.files()] == [50.0, 1.0]


def test_recency_is_written_by_itself_after_a_while(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.cache.disk.writer.TOUCH_WITHIN_S", 0.05)
    with shelf.open() as disk:
        disk_file = put(disk, address_of(disk, [1], 0))
        assert disk.flush(10)
        disk.touch([disk_file], 50.0)
        assert disk._writer.wait_for(disk._writer._is_idle, 60)


def test_what_is_older_than_its_time_to_live_is_gone_after_a_start(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put(disk, address_of(disk, [1], 0), last_used=100.0)
        young = put(disk, address_of(disk, [2], 0), last_used=190.0)
        put_point(disk, point_of(disk, [1]), reason=0, is_kept=True, is_superseded=False, last_used=100.0)
    with shelf.open(ttl_s=50.0, clock=lambda: 200.0) as disk:
        assert [disk_file.address for disk_file in disk.files()] == [young.address] and disk.points() == []
        assert disk.flush(10)
        assert disk.counts.dropped == 1
        assert disk.used_bytes == shelf.page_bytes() == young.nbytes
    with shelf.open() as disk:
        assert len(disk.files()) == 1 and disk.points() == []


def test_room_is_what_the_budget_leaves(shelf: Shelf) -> None:
    with shelf.open(budget_bytes=3000) as disk:
        assert disk.has_room(3000) and not disk.has_room(3001)
        disk_file = put(disk, address_of(disk, [1], 0))
        left = 3000 - disk_file.nbytes
        assert disk.has_room(left) and not disk.has_room(left + 1)  # pending counts
        disk.drop(disk_file)
        assert disk.has_room(3000)


def test_room_leaves_the_file_system_its_floor(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "free_bytes", lambda folder: 10_000)
    with shelf.open(floor_bytes=9_000) as disk:
        assert disk.has_room(1_000) and not disk.has_room(1_001)
    with shelf.open(floor_bytes=11_000) as disk:
        assert not disk.has_room(0)


def test_clearing_leaves_no_token_in_any_file(disk: Disk, shelf: Shelf) -> None:
    tokens = [123456789, 987654321, 555555555, 777777777]
    files = put_path(disk, tokens * 20)
    put_point(disk, point_of(disk, tokens), reason=0, is_kept=True, is_superseded=False, last_used=1.0)
    assert disk.flush(10)
    assert _files_with(shelf, pack(tokens))
    with held_writer(disk):
        pending = put(disk, address_of(disk, [*tokens, *tokens], 4, group=1))
    disk.clear()()

    assert _files_with(shelf, pack(tokens[:2])) == []
    assert shelf.page_files() == [] and disk.used_bytes == disk.claimed_bytes == disk.num_files == 0
    assert disk.points() == [] and not files[0].is_saved and not pending.is_saved
    with pytest.raises(DiskMiss):
        get(disk, files[0])
    disk.drop(files[0])
    assert save(disk, put(disk, files[0].address))  # it goes on


def test_clearing_one_salt_leaves_the_others(disk: Disk, shelf: Shelf) -> None:
    ours, theirs = [111111111, 222222222], [333333333, 444444444]
    put_path(disk, ours, salt="ours")
    kept = put_path(disk, theirs, salt="theirs")
    for tokens, salt in ((ours, "ours"), (theirs, "theirs")):
        put_point(disk, point_of(disk, tokens, salt), reason=0, is_kept=True, is_superseded=False, last_used=1.0)
    assert disk.flush(10)

    disk.clear(disk.root("ours"))()

    assert disk.files() == kept and len(disk.points()) == 1
    assert _files_with(shelf, pack(ours)) == [] and _files_with(shelf, pack(theirs))
    assert get(disk, kept[0]) == content_of(kept[0].address)


def test_clearing_a_small_salt_does_not_write_the_whole_index_anew(disk: Disk, shelf: Shelf) -> None:
    ours = [111111111, 222222222]
    for number in range(300):
        put_path(disk, [number, *range(40)], salt="theirs")
    put_path(disk, ours, salt="ours")
    assert disk.flush(4 * BOUND_S)
    statements: list[str] = []
    disk._opened.owned.index.connection.set_trace_callback(statements.append)

    disk.clear(disk.root("nobody"))()
    disk.clear(disk.root("ours"))()

    assert "VACUUM" not in statements
    assert _files_with(shelf, pack(ours)) == []
    disk.clear(disk.root("theirs"))()
    assert "VACUUM" in statements  # nearly all was free then


def test_times_from_the_future_count_as_now_after_a_restart(shelf: Shelf) -> None:
    now, day_s = 1.7e9, 86_400.0
    with shelf.open(clock=lambda: now + 3_650 * day_s) as disk:  # the clock was ten years ahead for a while
        put_path(disk, range(8))
        put_point(disk, point_of(disk, range(8)), reason=0, is_kept=False, is_superseded=False)

    with shelf.open(clock=lambda: now) as disk:
        assert all(disk_file.last_used <= now for disk_file in disk.files())
        assert all(record.last_used <= now for record in disk.points())
    with shelf.open(clock=lambda: now + 8 * day_s, ttl_s=7 * day_s) as disk:
        assert (disk.files(), disk.points()) == ([], [])  # not immortal: what was clamped is written down, too


def test_files_that_the_index_does_not_know_are_collected(shelf: Shelf) -> None:
    with shelf.open() as disk:
        files = put_path(disk, range(8))
    stray = shelf.page_files()[0].parent / ("ab" * 16)
    stray.write_bytes(b"left by a crash")
    (shelf.folder / "tmp" / "half").write_bytes(b"half a page")

    with shelf.open() as disk:
        assert disk.flush(10)
        assert disk.counts.orphans == 1
        assert not stray.exists() and not (shelf.folder / "tmp" / "half").exists()
        assert disk.used_bytes == shelf.page_bytes() == sum(disk_file.nbytes for disk_file in files)


def test_opening_reads_100_000_records(shelf: Shelf) -> None:
    with shelf.open(page_tokens=256) as disk:
        identity, keys, root = disk.identity, disk.keys, disk.root("")
    _fill_index(shelf.folder / INDEX, identity, keys, root, 100_000)

    with shelf.open(page_tokens=256) as disk:
        assert len(disk.files()) == 100_000 and disk.counts.bad_rows == 0


def _fill_index(file: Path, identity: Identity, keys: PageKeys, root: bytes, num_files: int) -> None:
    index = Index(file, identity, keys)
    tokens = pack(range(256))
    addresses = [
        Address(root, number.to_bytes(16, "little"), tokens, 0, 256 * number, 256 * number + 256)
        for number in range(num_files)
    ]
    index.apply(IndexChanges(saved=[DiskFile(keys.name(address), address, 10**6, 1.0) for address in addresses]))
    index.close()


def _files_with(shelf: Shelf, needle: bytes) -> list[Path]:
    return [file for file in shelf.folder.rglob("*") if file.is_file() and needle in file.read_bytes()]
