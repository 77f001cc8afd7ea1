"""The reader: files are read and checked by threads, once for all that want them, and a hanging disk stops no caller."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bough.cache.disk import Disk, DiskMiss, page_files
from bough.cache.disk.page_files import KeepReading
from bough.cache.disk.reader import NUM_THREADS, DiskReader, ReadList
from bough.cache.tree.address import Address, DiskFile
from bough.errors import EngineError
from tests.cache.disk.shelf import Shelf, content_of, put_path
from tests.waiting import BOUND_S, wait_until


def read_all(disk: Disk, files: list[DiskFile]) -> ReadList:
    reads = disk.reader.open_list()
    reads.want(files)
    wait_until(lambda: reads.num_done == len(files))
    return reads


def take(disk: Disk, reads: ReadList, file: DiskFile) -> bytearray:
    read = reads.find(file)
    assert read is not None
    return disk.take(read)


def test_what_is_wanted_is_read_and_counted_once_for_all_who_want_it(disk: Disk) -> None:
    files = put_path(disk, range(20))
    assert disk.flush(10)
    lists = [disk.reader.open_list() for _ in range(3)]
    for reads in lists:
        reads.want(files)
    wait_until(lambda: all(reads.num_done == len(files) for reads in lists))

    for reads in lists:
        assert [take(disk, reads, file) for file in files] == [content_of(file.address) for file in files]

    assert disk.counts.loaded == len(files)
    assert disk.reader.progress().num_bytes == sum(len(content_of(file.address)) for file in files)
    for reads in lists:
        reads.close()
    assert disk.reader.num_reads == 0


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_file_that_is_not_what_it_should_be_is_a_miss_when_it_is_taken(disk: Disk, shelf: Shelf, damage: str) -> None:
    (file,) = put_path(disk, range(4))
    assert disk.flush(10)
    _damage(shelf.page_files()[0], damage)
    reads = read_all(disk, [file])
    assert file.is_saved  # the reader's threads change nothing

    for _ in range(2):
        with pytest.raises(DiskMiss):
            take(disk, reads, file)

    assert file.has_failed and not file.is_saved and sum(disk.counts.misses.values()) == 1
    disk.check()


def _damage(file: Path, damage: str) -> None:
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\0")


def test_no_memory_and_mistakes_of_ours_lose_no_file(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = put_path(disk, range(8))
    assert disk.flush(10)
    failures = iter([MemoryError(), RuntimeError("a mistake")])
    monkeypatch.setattr(page_files, "read_into", lambda *_: (_ for _ in ()).throw(next(failures)))
    monkeypatch.setattr("bough.cache.disk.reader.log.exception", lambda *_: None)
    for file, kind in ((first, MemoryError), (second, EngineError)):
        reads = read_all(disk, [file])
        with pytest.raises(kind):
            take(disk, reads, file)
        reads.close()
    assert first.is_saved and second.is_saved


class Hanging:
    """A function that reads in place of a disk: files hang until they are let go."""

    def __init__(self) -> None:
        self.begun: list[DiskFile] = []
        self.goes_on = threading.Event()
        self.hangs: set[DiskFile] = set()

    def __call__(self, file: DiskFile, keep_reading: KeepReading) -> bytearray:
        self.begun.append(file)
        if file in self.hangs:
            assert self.goes_on.wait(BOUND_S)
        keep_reading(4)
        return bytearray(4)


def files_of(number: int) -> list[DiskFile]:
    return [DiskFile(b"", Address(b"", b"", b"", 0, at, at + 1), 4, is_saved=True) for at in range(number)]


def test_a_read_that_hangs_stops_neither_the_caller_nor_other_reads() -> None:
    hanging, files = Hanging(), files_of(4)
    hanging.hangs = {files[0]}
    reader = DiskReader(hanging)
    stuck, other = reader.open_list(), reader.open_list()
    stuck.want(files[:1])
    wait_until(lambda: hanging.begun == files[:1])

    other.want(files[1:])
    wait_until(lambda: other.num_done == 3)

    assert NUM_THREADS > 1 and stuck.num_done == 0
    stuck.close()
    other.close()
    reader.close()
    hanging.goes_on.set()


def test_what_nobody_wants_any_more_is_not_read() -> None:
    hanging, files = Hanging(), files_of(NUM_THREADS + 2)
    hanging.hangs = set(files[:NUM_THREADS])
    reader = DiskReader(hanging)
    reads = reader.open_list()
    reads.want(files)
    wait_until(lambda: len(hanging.begun) == NUM_THREADS)

    reads.want(files[-1:])
    hanging.goes_on.set()
    wait_until(lambda: reads.num_done == 1)

    assert files[NUM_THREADS] not in hanging.begun
    reads.close()
    reader.check()
    reader.close()


def test_lists_take_turns_so_that_a_long_one_does_not_hold_up_a_short_one() -> None:
    """Without threads: what is taken next is asked for directly."""
    reader, files = DiskReader(Hanging()), files_of(8)
    reader._start_threads = lambda: None  # type: ignore[method-assign]
    long, short = reader.open_list(), reader.open_list()
    long.want(files[:6])
    short.want(files[6:])
    with reader.changed:
        order = [read.file for _ in range(8) if (read := reader.take_next()) is not None]
    assert [files.index(file) for file in order] == [0, 6, 1, 7, 2, 3, 4, 5]


def test_a_large_file_that_nobody_wants_any_more_is_given_up_in_the_middle(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = put_path(disk, range(4))
    assert disk.flush(10)
    monkeypatch.setattr(page_files, "READ_BYTES", 10)
    reads, num_reads = disk.reader.open_list(), 0
    read_into = page_files.read_into

    def counted(descriptor: int, view: memoryview) -> int:
        nonlocal num_reads
        count = read_into(descriptor, view)
        num_reads += disk.reader.progress().num_bytes > 0  # of the payload
        if num_reads == 5:
            reads.close()
        return count

    monkeypatch.setattr(page_files, "read_into", counted)
    reads.want([file])
    wait_until(lambda: num_reads >= 5 and disk.reader.progress() == disk.reader.progress())  # no time passes: it rests
    assert num_reads == 5 and file.is_saved


def test_time_in_which_a_read_hangs_that_nobody_wants_does_not_count() -> None:
    now, files = [0.0], files_of(2)
    reader = DiskReader(Hanging(), lambda: now[0])
    reader._start_threads = lambda: None  # type: ignore[method-assign]
    reads = reader.open_list()
    reads.want(files)
    with reader.changed:
        hung = reader.take_next()
    now[0] += 3.0
    reads.want(files[1:])
    now[0] += 60.0
    assert reader.progress().busy_s == 3.0
    with reader.changed:
        other = reader.take_next()
    now[0] += 1.0
    for read in (other, hung):
        assert read is not None
        reader.carry_out(read)
    assert reader.progress().busy_s == 4.0
    reads.close()
    reader.check()


def test_no_more_is_read_while_enough_waits_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.cache.disk.reader.MAX_HELD_BYTES", 8)  # two files of four bytes
    reader, files = DiskReader(Hanging()), files_of(6)
    reads = reader.open_list()
    reads.want(files)
    wait_until(lambda: reads.num_done >= 2)
    with reader.changed:
        assert reader.take_next() is None  # nor is there more for its threads
    assert reads.num_done <= 2 + NUM_THREADS

    reads.want(files[4:])
    wait_until(lambda: reads.num_done == 2)
    reads.close()
    reader.check()
    reader.close()


def test_without_threads_reads_fail_and_the_next_time_they_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, files = DiskReader(Hanging()), files_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more threads")))
        reads = reader.open_list()
        reads.want(files)
        assert all(isinstance((read := reads.find(file)) and read.error, EngineError) for file in files)
        reads.close()
    reader.check()
    reads.want(files)
    wait_until(lambda: reads.num_done == 2)
    reads.close()
    reader.close()
