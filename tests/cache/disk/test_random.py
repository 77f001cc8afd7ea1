"""Whatever is done in whatever order, and whichever of it fails, the books are right and content is never another's."""

from __future__ import annotations

import errno
import os
import random
import sqlite3

import pytest

from bough.cache.disk import Disk, DiskMiss, page_files
from bough.cache.disk.index import Index, IndexChanges, Rejected
from bough.cache.tree.address import DiskFile
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, put, save
from tests.waiting import BOUND_S, wait_until


class Play:
    """Random use of a disk that fails now and then."""

    def __init__(self, shelf: Shelf, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.is_failing = False
        self.shelf = shelf
        self.held: list[DiskFile] = []  # one entry for each user
        apply, write_some = Index.apply, page_files.write_some

        def write_or_fail(descriptor: int, parts: list[memoryview]) -> int:
            if self.is_failing and self.random.random() < 0.3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_some(descriptor, parts)

        def apply_or_fail(index: Index, changes: IndexChanges) -> Rejected:
            if self.is_failing and self.random.random() < 0.3:
                raise sqlite3.OperationalError("disk I/O error")
            return apply(index, changes)

        monkeypatch.setattr(page_files, "write_some", write_or_fail)
        monkeypatch.setattr(Index, "apply", apply_or_fail)
        monkeypatch.setattr("bough.cache.disk.writer.FIRST_BACK_OFF_S", 0.001)
        monkeypatch.setattr("bough.cache.disk.writer.MAX_BACK_OFF_S", 0.004)
        self.disk = shelf.open()

    def step(self) -> None:
        act = self.random.choice(
            [self.put, self.put, self.put, self.drop, self.drop, self.get, self.save, self.share, self.wait]
        )
        act()
        if self.random.random() < 0.05:
            self.is_failing = not self.is_failing
        self.disk.check()

    def put(self) -> None:
        address = address_of(self.disk, [self.random.randrange(20)], 0)
        if self.held and self.random.random() < 0.3:
            self.drop()
        self.held.append(put(self.disk, address))

    def drop(self) -> None:
        if self.held:
            self.disk.drop(self.held.pop(self.random.randrange(len(self.held))))

    def share(self) -> None:
        if self.held:
            self.held.append(put(self.disk, self.random.choice(self.held).address))

    def save(self) -> None:
        if self.held:
            disk_file = self.random.choice(self.held)
            assert save(self.disk, disk_file) == disk_file.is_saved

    def get(self) -> None:
        if self.held:
            disk_file = self.random.choice(self.held)
            try:
                assert get(self.disk, disk_file) == content_of(disk_file.address)
            except DiskMiss:
                assert disk_file.has_failed

    def wait(self) -> None:
        """Let the writer end what it is at, or do all that it can do now."""
        if self.random.random() < 0.5:
            assert self.disk._writer.wait_for(lambda: not self.disk._writer._is_busy, BOUND_S)
        else:
            self.disk.flush(BOUND_S)

    def settle(self) -> Disk:
        """Let the disk recover and carry everything out."""
        self.is_failing = False
        wait_until(lambda: self.disk.flush(BOUND_S))
        self.disk.check()
        return self.disk


@pytest.mark.parametrize("seed", range(4))
def test_the_books_are_right_whatever_happens(shelf: Shelf, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(shelf, seed, monkeypatch)
    for _ in range(600):
        play.step()
    disk = play.settle()

    assert disk.used_bytes == disk.claimed_bytes == shelf.page_bytes()
    assert disk.pending_bytes == 0 and disk._ledger.leaving_bytes == 0
    saved = {disk_file.address for disk_file in disk.files()}
    assert {disk_file.address for disk_file in play.held if disk_file.is_saved} <= saved
    assert sum(disk.counts.misses[reason] for reason in ("truncated", "damaged", "foreign", "unreadable")) == 0
    disk.close()
    with shelf.open() as again:
        assert {disk_file.address for disk_file in again.files()} == saved
        assert all(get(again, disk_file) == content_of(disk_file.address) for disk_file in again.files())
        assert again.flush(10) and again.counts.orphans == 0
