"""One owner at a time; what must not be used is set aside; killed at any instant, a store is consistent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.trees import verify_tree
from bough.cache.disk import DiskBusy, DiskError, page_files
from bough.cache.disk.folder import FolderLock
from bough.cache.disk.index import INDEX
from bough.tokens import unpack
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, put, put_path, save

HOLD_LOCK = """
import fcntl, os, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(); file.write(str(os.getpid())); file.flush()
print("held", flush=True)
sys.stdin.read()
"""

WRITE_FOREVER = """
import itertools, pathlib, sys
from tests.cache.disk.shelf import Shelf, address_of, put, save
disk = Shelf(pathlib.Path(sys.argv[1])).open()
print("open", flush=True)
kept = []
for number in itertools.count():
    copy = put(disk, address_of(disk, [number], 0))
    kept.append(copy)
    if number > 100 and number % 7 == 0:
        disk.drop(kept.pop(0))
    if number % 20 == 0:
        assert save(disk, copy)
        print(number, flush=True)
"""


def test_a_folder_has_one_owner_in_one_process(shelf: Shelf) -> None:
    with shelf.open():
        with pytest.raises(DiskBusy, match=f"process {os.getpid()}") as busy:
            shelf.open()
        assert busy.value.folder == shelf.folder and str(shelf.folder) in str(busy.value)
    shelf.open().close()


def test_a_folder_has_one_owner_among_processes(shelf: Shelf) -> None:
    shelf.open().close()
    command = [sys.executable, "-c", HOLD_LOCK, str(shelf.folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(DiskBusy) as busy:
            shelf.open()
        assert busy.value.pid == other.pid
        other.kill()
    shelf.open().close()


def test_a_folder_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match="file"):
        Shelf(tmp_path / "file" / "tree").open()


def expect_set_aside(shelf: Shelf, **changes: Any) -> Path:
    """Opening must succeed with an empty store and the old content beside it."""
    old = {file.name: file.read_bytes() for file in shelf.page_files()}
    with shelf.open(**changes) as disk:
        assert disk.files() == [] and disk.points() == []
        assert disk.counts.set_aside == 1 and len(shelf.warnings) == 1
        assert shelf.page_files() == [] and disk.used_bytes == 0
        saved = put_path(disk, range(8))
        assert disk.flush(10) and get(disk, saved[0]) == content_of(saved[0].address)
    aside = shelf.folder.with_name("tree.set-aside-1")
    assert {file.name: file.read_bytes() for file in aside.glob("pages/*/*")} == old
    return aside


@pytest.mark.parametrize("changes", [{"fingerprint": "fingerprint-2"}, {"page_tokens": 8}])
def test_a_tree_of_another_model_is_set_aside(shelf: Shelf, changes: dict[str, Any]) -> None:
    with shelf.open() as disk:
        put_path(disk, range(8))
    expect_set_aside(shelf, **changes)
    with shelf.open():  # and the other way round, beside the first
        assert shelf.folder.with_name("tree.set-aside-2").is_dir()


def change_index(*statements: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        connection = sqlite3.connect(folder / INDEX)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return change


def scribble(folder: Path) -> None:
    content = bytearray((folder / INDEX).read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    (folder / INDEX).write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        change_index("UPDATE meta SET value = '0' WHERE key = 'format'"),
        change_index("DROP TABLE meta"),
        change_index("DROP TABLE copies"),
        change_index("PRAGMA application_id = 7"),
        scribble,
        lambda folder: (folder / INDEX).write_bytes(b"this is not SQLite" * 500),
        lambda folder: os.truncate(folder / INDEX, 12_000),
        lambda folder: (folder / "secret").unlink(),
        lambda folder: (folder / "secret").write_bytes(b"short"),
        lambda folder: (folder / "secret").write_bytes(bytes(32)),
    ],
    ids=["format", "no meta", "no copies", "foreign", "scribble", "text", "cut", "no secret", "short secret", "secret"],
)
def test_a_damaged_or_foreign_index_is_set_aside(shelf: Shelf, damage: Callable[[Path], Any]) -> None:
    with shelf.open() as disk:
        put_path(disk, range(16))
    damage(shelf.folder)
    expect_set_aside(shelf)


def test_a_lost_index_means_an_empty_tree(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put_path(disk, range(8))
    (shelf.folder / INDEX).unlink()
    with shelf.open() as disk:
        assert disk.files() == [] and disk.counts.set_aside == 0
        assert disk.flush(10) and shelf.page_files() == [] and disk.counts.orphans == 2


def test_an_index_without_counts_of_uses_is_read_and_gets_them(shelf: Shelf) -> None:
    """Indexes written before there were such counts open unchanged."""
    with shelf.open() as disk:
        put_path(disk, range(4))
    with contextlib.closing(sqlite3.connect(shelf.folder / INDEX)) as connection:
        connection.execute("DROP TABLE hits")

    assert verify_tree(shelf.folder).problems == ()  # which only reads it
    for hits in (1, 7):
        with shelf.open() as disk:
            (file,) = disk.files()
            assert file.hits == hits
            file.hits = 7
            disk.touch([file], 50.0)
            assert disk.flush(10)


def test_another_name_for_the_same_model_is_no_other_model(shelf: Shelf) -> None:
    with shelf.open(model="one") as disk:
        put_path(disk, range(8))
    with shelf.open(model="two") as disk:
        assert len(disk.files()) == 2 and disk.identity.model == "two"


@pytest.mark.parametrize("number", [0, 240])  # the second when much was dropped, too
def test_killed_at_any_instant_the_store_is_consistent(shelf: Shelf, number: int) -> None:
    command = [sys.executable, "-c", WRITE_FOREVER, str(shelf.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
        while writer.stdout.readline() != b"%d\n" % number:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        last = [number, *map(int, writer.stdout.read().split())][-1]

    assert verify_tree(shelf.folder).problems == ()
    with shelf.open() as disk:
        assert disk.counts.set_aside == 0
        assert all(get(disk, disk_file) == content_of(disk_file.address) for disk_file in disk.files())
        saved = {unpack(disk_file.address.tokens)[0] for disk_file in disk.files()}
        assert last in saved or ((last + 1) % 3 == 0 and last + 1 in saved)  # what was said to be safe is, or its successor
        assert disk.flush(10)
        assert disk.used_bytes == shelf.page_bytes()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[os.stat_result]:
    """What is synced from now on."""
    found: list[os.stat_result] = []

    def sync(descriptor: int) -> None:
        os.fsync(descriptor)
        found.append(os.fstat(descriptor))

    monkeypatch.setattr(page_files, "sync", sync)
    return found


def is_among(folder: Path, synced: list[os.stat_result]) -> bool:
    return any(os.path.samestat(folder.stat(), each) for each in synced)


def test_the_names_of_a_tree_and_of_the_folder_of_trees_are_safe(shelf: Shelf, synced: list[os.stat_result]) -> None:
    shelf.open().close()
    assert is_among(shelf.folder.parent, synced) and is_among(shelf.folder.parent.parent, synced)


def test_folders_that_a_killed_process_made_are_safe_before_files_in_them(
    shelf: Shelf, synced: list[os.stat_result]
) -> None:
    with shelf.open() as disk:
        address = address_of(disk, [1, 2, 3, 4], 0)
        (shelf.folder / "pages" / disk.keys.name(address).hex()[:2]).mkdir()  # as if by a process that was killed then
    synced.clear()
    with shelf.open() as disk:
        assert save(disk, put(disk, address))
        assert is_among(shelf.folder / "pages", synced)


def test_what_a_killed_process_left_in_the_log_is_in_the_index_after_the_next_start(shelf: Shelf, tmp_path: Path) -> None:
    with shelf.open() as disk:
        put_path(disk, range(8))
        assert disk.flush(10)
        shutil.copytree(shelf.folder, tmp_path / "killed" / "tree")
    with Shelf(tmp_path / "killed" / "tree").open():
        (tmp_path / "index").write_bytes((tmp_path / "killed" / "tree" / INDEX).read_bytes())  # without its log
        with contextlib.closing(sqlite3.connect(tmp_path / "index")) as connection:
            assert connection.execute("SELECT count(*) FROM copies").fetchone() == (2,)


def in_a_fork(work: Callable[[], object]) -> None:
    """Do some work in a forked child, which ends without any cleaning up, and require that it went well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, and the child uses none of them
        pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_forked_child_that_closes_the_store_leaves_the_parents_alone(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put_path(disk, range(12))
        assert disk.flush(10)
        before = all_files(shelf.folder)
        assert before["lock"] == f"{os.getpid()}\n".encode()
        assert before["index.sqlite-wal"], "the log is not empty, so that a checkpoint would show"

        in_a_fork(disk.close)

        assert all_files(shelf.folder) == before
        with pytest.raises(DiskBusy, match=f"process {os.getpid()}"):
            shelf.open()
        disk_file = put(disk, address_of(disk, [99], 0))
        assert disk.flush(10)
        assert get(disk, disk_file) == content_of(disk_file.address)
    with shelf.open() as again:
        assert len(again.files()) == 4


def test_a_forked_child_closes_the_store_even_if_a_lock_was_held_when_it_was_forked(shelf: Shelf) -> None:
    with shelf.open() as disk:
        has_lock, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with disk._ledger.changed:
                has_lock.set()
                may_end.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert has_lock.wait(60)

        def close() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends a child that waits for a lock which nobody can give back
            disk.close()

        try:
            in_a_fork(close)
        finally:
            may_end.set()
            holder.join()


def test_a_forked_child_that_releases_a_lock_leaves_it_with_the_parent(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        in_a_fork(lock.release)

        assert (tmp_path / "lock").read_bytes() == f"{os.getpid()}\n".encode()
        with pytest.raises(DiskBusy):
            FolderLock(tmp_path)
    FolderLock(tmp_path).release()
