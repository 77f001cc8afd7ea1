"""A disk that cannot own its folder reads it: whatever is asked of it, nothing in the folder changes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bough.cache.disk import Disk, DiskError, DiskMiss, DiskUnwritable, NotOwner, ReadOnlyTree
from bough.cache.disk.folder import FolderLock
from bough.cache.disk.index import open_read_only
from bough.cache.disk.index_rows import decode_groups, encode_groups
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, point_of, put, put_path, put_point
from tests.fakes import MODELS

TOKENS = list(range(10))


def read(shelf: Shelf, **changes: Any) -> Disk:
    """A reader beside the owner; there must be one."""
    with pytest.raises(NotOwner) as raised:
        shelf.open()
    return shelf.open(not_owner=raised.value, **changes)


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if not path.name.endswith("-shm")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def test_a_reader_reads_what_its_owner_has_saved_and_says_who_that_is(disk: Disk, shelf: Shelf) -> None:
    files = put_path(disk, TOKENS)
    assert disk.flush(10)

    with read(shelf) as reader, read(shelf) as another:
        for each in (reader, another):
            assert [bytes(get(each, file)) for file in each.files()] == [content_of(file.address) for file in files]
        assert reader.read_only == f"in use by process {os.getpid()}"
        assert (reader.used_bytes, reader.num_files) == (disk.used_bytes, 3) and not reader.is_failing


def test_nothing_that_a_reader_is_asked_for_changes_the_folder(disk: Disk, shelf: Shelf) -> None:
    put_path(disk, TOKENS)
    put_point(disk, point_of(disk, TOKENS[:4]), reason=1, is_kept=True, is_superseded=False)
    assert disk.flush(10)
    before = snapshot(shelf.folder)

    with read(shelf, ttl_s=1.0) as reader:  # all is older than that
        assert reader.num_files == 0
    with read(shelf) as reader:
        first, second, _ = reader.files()
        for file in (first, second):
            reader.use(file)
        reader.touch([first], 5.0)
        reader.drop_point(point_of(reader, TOKENS[:4]))
        reader.drop(first)
        reader.mark_lost(second, DiskMiss("damaged"))
        new = put(reader, address_of(reader, [99], 0))
        assert new.has_failed and not reader.has_room(1) and not reader.can_write
        assert reader.flush(1) and reader.settle()
        with pytest.raises(ReadOnlyTree, match=f"nothing was deleted on disk.*in use by process {os.getpid()}"):
            reader.clear()()
        reader.check()

    assert snapshot(shelf.folder) == before
    assert len(disk.files()) == 3


def test_a_reader_does_not_say_that_the_disk_is_full(disk: Disk, shelf: Shelf) -> None:
    said: list[str] = []

    with read(shelf, warn=said.append, floor_bytes=1) as reader:
        assert not reader.has_room(1)
        assert reader.problem.startswith("the tree is only read")

    assert said == []


def test_a_file_that_the_owner_has_deleted_is_a_miss_without_a_warning(disk: Disk, shelf: Shelf) -> None:
    (ours,) = put_path(disk, TOKENS[:4])
    assert disk.flush(10)
    reader = read(shelf)
    (file,) = reader.files()
    disk.drop(ours)
    assert disk.flush(10)

    with reader, pytest.raises(DiskMiss, match="missing"):
        get(reader, file)

    assert reader.counts.misses["missing"] == 1 and not shelf.warnings


def test_a_file_that_was_dropped_and_is_wanted_again_is_read_again(disk: Disk, shelf: Shelf) -> None:
    put_path(disk, TOKENS[:4])
    assert disk.flush(10)

    with read(shelf) as reader:
        (file,) = reader.files()
        reader.use(file)
        reader.drop(file)
        assert put(reader, file.address) is file
        assert get(reader, file) == content_of(file.address)


def test_a_tree_that_its_owner_is_just_beginning_is_empty(shelf: Shelf) -> None:
    shelf.folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(shelf.folder), read(shelf) as reader:
        assert reader.files() == [] and reader.points() == []
    assert [file.name for file in shelf.folder.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_written_is_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The superuser may write everywhere, so the file system is made to refuse."""
    with shelf.open() as disk:
        put_path(disk, TOKENS)
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(DiskUnwritable, match="Read-only file system") as raised:
        shelf.open()
    with shelf.open(not_owner=raised.value) as reader:
        assert len(reader.files()) == 3
        assert reader.read_only == "in a folder that cannot be written (Read-only file system)"


def test_an_owner_that_clears_is_told_if_a_reader_still_has_the_log(disk: Disk, shelf: Shelf) -> None:
    """Else what was cleared would stay in the log of the index, and nobody would know."""
    put_path(disk, TOKENS)
    assert disk.flush(10)
    assert disk._opened.owned is not None
    disk._opened.owned.index.connection.execute("PRAGMA busy_timeout = 50")
    with open_read_only(shelf.folder) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM copies").fetchall()
        with pytest.raises(DiskError, match="another process reads the index"):
            disk.clear()()
    assert disk.flush(10)


@pytest.mark.parametrize("model", MODELS)
def test_the_groups_of_a_model_are_kept_in_the_index(model: str) -> None:
    assert decode_groups(encode_groups(MODELS[model])) == list(MODELS[model])


@pytest.mark.parametrize("text", ["", "{", "7", '[[1, "odd", 2, 3, 4]]', '[[-1, "full", 2, 3, 4]]', "[[0]]", "[" * 9999])
def test_groups_that_make_no_sense_are_none(text: str) -> None:
    assert decode_groups(text) == []


def test_who_opens_a_tree_without_knowing_its_groups_leaves_those_that_it_has(shelf: Shelf) -> None:
    shelf.open(groups=MODELS["full+window"]).close()
    shelf.open().close()

    with shelf.open() as disk:
        assert disk._opened.owned is not None
        meta = dict(disk._opened.owned.index.connection.execute("SELECT key, value FROM meta"))
        assert decode_groups(meta["groups"]) == list(MODELS["full+window"])
