"""A failing disk costs a miss or a write, never an error in the engine's thread, and the store recovers by itself."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bough.cache.disk import Disk, DiskMiss, page_files
from bough.cache.disk.index import Index
from bough.cache.tree.address import DiskFile
from tests.cache.disk.shelf import (
    CONTENT_BYTES,
    Shelf,
    address_of,
    content_of,
    end_back_off,
    get,
    held_writer,
    long_back_off,
    put,
    put_path,
    put_point,
    save,
)


def saved_files(disk: Disk, num_tokens: int = 8) -> list[DiskFile]:
    files = put_path(disk, range(num_tokens))
    assert disk.flush(10)
    return files


def file_of(disk: Disk, disk_file: DiskFile) -> Path:
    return disk._opened.files.path(disk.keys.name(disk_file.address))


def expect_miss(disk: Disk, disk_file: DiskFile, reason: str) -> None:
    """Reading must be a miss for this reason; the copy and its file must then be gone, now and after a restart."""
    with pytest.raises(DiskMiss) as miss:
        get(disk, disk_file)
    assert miss.value.reason == reason
    assert disk.counts.misses == dict.fromkeys(disk.counts.misses, 0) | {reason: 1}
    assert disk_file.has_failed and not disk_file.is_saved
    assert disk.flush(10)
    assert not file_of(disk, disk_file).exists()
    assert disk_file.address not in {other.address for other in disk.files()}
    disk.check()


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "missing"),
        (lambda file: file.write_bytes(b""), "truncated"),
        (lambda file: os.truncate(file, 10), "truncated"),
        (lambda file: os.truncate(file, 60), "truncated"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "truncated"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "damaged"),
        (lambda file: flip(file, -1), "damaged"),
        (lambda file: flip(file, 0), "damaged"),
        (lambda file: flip(file, 12), "damaged"),
        (lambda file: flip(file, 20), "damaged"),
        (lambda file: flip(file, 40), "damaged"),
        (lambda file: flip(file, 7), "foreign"),  # the format's version
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_a_miss(
    disk: Disk, shelf: Shelf, damage: Callable[[Path], Any], reason: str
) -> None:
    bad, good = saved_files(disk)
    damage(file_of(disk, bad))

    expect_miss(disk, bad, reason)
    assert get(disk, good) == content_of(good.address)
    assert len(shelf.warnings) == 1 and reason in shelf.warnings[0]


def test_swapped_files_are_foreign_to_each_other(disk: Disk) -> None:
    one, other = saved_files(disk)
    first, second = file_of(disk, one), file_of(disk, other)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])

    expect_miss(disk, one, "foreign")
    with pytest.raises(DiskMiss, match="foreign"):
        get(disk, other)


def test_every_flipped_bit_of_a_header_is_noticed(disk: Disk) -> None:
    disk_file = saved_files(disk, 4)[0]
    file = file_of(disk, disk_file)
    for at in range(file.stat().st_size - CONTENT_BYTES):
        flip(file, at)
        with pytest.raises(DiskMiss):
            disk.read(disk_file)
        flip(file, at)
    assert get(disk, disk_file) == content_of(disk_file.address)


def test_a_file_of_another_fingerprint_is_foreign(disk: Disk) -> None:
    disk_file = saved_files(disk, 4)[0]
    other = page_files.PageFiles(disk.folder, "fingerprint-2")
    other.write(disk.keys.name(disk_file.address), disk_file.address, content_of(disk_file.address))
    expect_miss(disk, disk_file, "foreign")


def test_a_read_error_is_a_miss(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_file = saved_files(disk, 4)[0]

    def fail(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(page_files, "read_into", fail)
    expect_miss(disk, disk_file, "unreadable")


def test_reads_and_writes_may_come_in_bites(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "write_some", lambda descriptor, parts: os.write(descriptor, parts[0][:7]))
    monkeypatch.setattr(page_files, "read_into", lambda descriptor, view: os.readv(descriptor, [view[:5]]))
    disk_file = saved_files(disk, 4)[0]
    assert disk_file.is_saved and get(disk, disk_file) == content_of(disk_file.address)


def test_a_miss_is_warned_of_once_a_minute_for_each_reason(disk: Disk, shelf: Shelf) -> None:
    for disk_file in saved_files(disk, 12):
        file_of(disk, disk_file).unlink()
        with pytest.raises(DiskMiss):
            get(disk, disk_file)
    assert disk.counts.misses["missing"] == 3
    assert len(shelf.warnings) == 1


def test_what_was_lost_can_be_written_again_at_once(disk: Disk) -> None:
    disk_file = saved_files(disk, 4)[0]
    file_of(disk, disk_file).write_bytes(b"")
    with held_writer(disk):
        with pytest.raises(DiskMiss):
            get(disk, disk_file)
        again = put(disk, disk_file.address)
    assert disk.flush(10)

    assert again is not disk_file and again.is_saved
    assert get(disk, again) == content_of(disk_file.address)


def fail_with(number: int) -> Callable[..., Any]:
    def fail(*arguments: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("call", "number"),
    [("write_some", errno.ENOSPC), ("sync", errno.EIO), ("rename", errno.EIO), ("sync_folder", errno.EIO)],
)
def test_a_failing_write_is_counted_pauses_writing_and_recovers(
    disk: Disk, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    kept = saved_files(disk, 4)[0]
    with long_back_off(disk), monkeypatch.context() as failing:
        failing.setattr(page_files, call, fail_with(number))
        with held_writer(disk):
            waiting = [put(disk, address_of(disk, [n], 0)) for n in range(3)]
        assert not disk.flush(10)

        assert all(disk_file.has_failed and not disk_file.is_saved for disk_file in waiting)
        assert disk.counts.failed_writes == 4  # with the one that held the writer
        assert not disk.can_write and not disk.has_room(1)
        assert put(disk, waiting[0].address).has_failed  # refused for now
        assert list((shelf.folder / "tmp").iterdir()) == []
        assert disk.used_bytes == shelf.page_bytes() == disk.claimed_bytes == kept.nbytes
        assert len(shelf.warnings) == 1 and os.strerror(number) in shelf.warnings[0]

    assert disk.can_write and save(disk, put(disk, waiting[0].address))
    assert get(disk, kept) == content_of(kept.address)


def test_pauses_grow_while_failures_go_on_and_end_with_them(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "write_some", fail_with(errno.ENOSPC))
    pauses = []
    for n in range(3):
        assert not save(disk, put(disk, address_of(disk, [n], 0)))
        disk.flush(10)
        pauses.append(disk._writer._back_off_s)
        end_back_off(disk)
    assert pauses == [2.0, 4.0, 8.0]

    monkeypatch.undo()
    assert save(disk, put(disk, address_of(disk, [9], 0)))
    assert disk.flush(10)
    assert disk._writer._back_off_s == 1.0


def test_deleting_goes_on_while_the_disk_is_full(disk: Disk, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved_files(disk, 4)[0]
    monkeypatch.setattr(page_files, "write_some", fail_with(errno.ENOSPC))
    assert not save(disk, put(disk, address_of(disk, [9], 0)))
    disk.drop(kept)
    disk.flush(10)
    assert shelf.page_files() == []


def test_an_index_that_cannot_be_written_loses_nothing(disk: Disk, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped, part, other = saved_files(disk, 12)
    with long_back_off(disk), monkeypatch.context() as failing:
        failing.setattr(Index, "apply", fail_with_sqlite)
        with held_writer(disk):
            disk.drop(dropped)
            whole = put(disk, address_of(disk, [7, 7], 0))
            point = address_of(disk, [5], 1, group=-1)
            put_point(disk, point, reason=0, is_kept=True, is_superseded=False, last_used=1.0)
        assert not disk.flush(10)

        assert whole.has_failed and part.num_users == 1 and part in disk.files()
        assert len(shelf.page_files()) == 3
        disk.check()

    assert disk.flush(10)
    assert disk.files() == [part, other] and len(disk.points()) == 1
    assert len(shelf.page_files()) == 2  # what was to be deleted is
    assert get(disk, part) == content_of(part.address)


def test_a_disk_is_failing_until_a_write_succeeds(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not disk.is_failing
    with monkeypatch.context() as failing:
        failing.setattr(page_files, "write_some", fail_with(errno.ENOSPC))
        assert not save(disk, put(disk, address_of(disk, [1], 0)))
        disk.flush(10)
        assert disk.is_failing and "No space left on device" in disk.problem
    disk._ledger.back_off_until = 0.0
    assert disk.is_failing

    assert save(disk, put(disk, address_of(disk, [2], 0)))
    disk.flush(10)
    assert not disk.is_failing and disk.problem == ""


def test_a_file_system_without_its_floor_is_a_problem_until_there_is_room(disk: Disk, shelf: Shelf) -> None:
    disk.floor_bytes = 2**62
    assert not disk.has_room(1) and not disk.has_room(1)
    assert "is full" in disk.problem and f"{2**62:,} must stay free" in disk.problem
    assert len(shelf.warnings) == 1

    disk.floor_bytes = 0
    assert disk.has_room(1) and disk.problem == ""


def test_a_failure_with_nothing_left_to_do_is_over(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(Index, "apply", fail_with_sqlite)
        assert not save(disk, put(disk, address_of(disk, [1], 0)))
        assert disk._writer.wait_for(lambda: not disk._writer._is_busy, 10)  # it rests, and has not yet looked for orphans
        disk.flush(10)
    assert disk.flush(10)


def fail_with_sqlite(*arguments: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_content_that_cannot_be_read_from_memory_fails_alone(disk: Disk, shelf: Shelf) -> None:
    def fail() -> bytes:
        raise RuntimeError("the device is gone")

    with held_writer(disk):
        bad = disk.put(address_of(disk, [1], 0), fail, 1)
        wrong_size = disk.put(address_of(disk, [2], 0), lambda: b"four", 5)
        good = put(disk, address_of(disk, [3], 0))
    assert not disk.flush(10)

    assert bad.has_failed and wrong_size.has_failed and good.is_saved
    assert disk.counts.failed_writes == 2 and disk.can_write
    assert len(shelf.warnings) == 1


def test_nothing_waits_for_a_writer_that_has_ended(shelf: Shelf) -> None:
    disk = shelf.open()
    assert disk._writer.stop()

    disk_file = put(disk, address_of(disk, [1], 0))
    assert not save(disk, disk_file) and not disk.flush() and not disk.has_room(1)  # each waits without end for a live one
    disk.close()
