"""Clearing does not wait for anybody, and does not harm what is put meanwhile."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bough.cache.disk import Disk
from bough.cache.disk.index import Index
from tests.cache.disk.shelf import Shelf, address_of, point_of, put, put_point, save


def test_settling_waits_for_what_was_queued_and_tells_of_failures(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting, wait_for = threading.Event(), disk._writer.wait_for

    def note_and_wait(*given: Any) -> bool:
        is_waiting.set()
        return wait_for(*given)

    def read_nothing() -> None:
        assert is_waiting.wait(60)

    monkeypatch.setattr(disk._writer, "wait_for", note_and_wait)
    bad = disk.put(address_of(disk, [1], 0), read_nothing, 1)
    good = put(disk, address_of(disk, [1], 0, salt="other"))

    assert not disk.settle(disk.root("")) and bad.has_failed
    assert disk.settle(disk.root("other")) and good.is_saved
    assert disk.settle(disk.root("")) and disk.settle()  # nothing is left


@contextmanager
def indexing(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> Iterator[threading.Event]:
    """The first transaction inside the block waits for its end, and fails then if asked; the event tells that it began."""
    has_begun, may_end, apply = threading.Event(), threading.Event(), Index.apply

    def wait(index: Index, changes: Any) -> Any:
        if not has_begun.is_set():
            has_begun.set()
            assert may_end.wait(60)
            if fails:
                raise sqlite3.OperationalError("database or disk is full")
        return apply(index, changes)

    monkeypatch.setattr(Index, "apply", wait)
    yield has_begun
    may_end.set()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_being_indexed_while_it_is_cleared_is_gone_and_what_comes_after_it_stays(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The engine's thread goes on at once: here it puts again what it has just cleared."""
    with shelf.open() as disk:
        with indexing(monkeypatch, fails=fails) as has_begun:
            old = put(disk, address_of(disk, [1], 0))
            put_point(disk, point_of(disk, [1]), reason=0, is_kept=True, is_superseded=False, last_used=1.0)
            assert has_begun.wait(60)
            put_point(disk, point_of(disk, [1, 2]), reason=0, is_kept=True, is_superseded=False, last_used=1.0)
            wait = disk.clear()
            new = put(disk, address_of(disk, [2], 0))
            put_point(disk, point_of(disk, [2]), reason=0, is_kept=True, is_superseded=False, last_used=1.0)
            disk.check()
        wait()
        assert not old.is_saved or not disk._ledger.is_live(old)
        if fails:
            disk._writer._back_off_until = disk._ledger.back_off_until = 0.0
            new = put(disk, new.address)
        assert save(disk, new)
        disk.flush(10)
        disk.check()
        assert len(shelf.page_files()) == 1 and disk.used_bytes == disk.claimed_bytes == new.nbytes

    with shelf.open() as disk:
        assert [file.address for file in disk.files()] == [new.address]
        assert {record.address for record in disk.points()} == {point_of(disk, [2])}


def test_what_is_saved_between_a_clear_and_its_turn_stays_in_the_index(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer commits a batch that was put together after the clear, before it comes to the clear."""
    with shelf.open() as disk:
        old = put(disk, address_of(disk, [1], 0))
        assert disk.flush(10)
        disk._writer._clearings, clearings = [], disk._writer._clearings  # it does not come to them
        wait = disk.clear()
        waiting, disk._writer._clearings = disk._writer._clearings, clearings
        new = put(disk, address_of(disk, [2], 0))
        assert save(disk, new)
        with disk._ledger.changed:
            disk._writer._clearings += waiting
            disk._ledger.changed.notify_all()
        wait()
        assert new.is_saved and not old.is_saved

    with shelf.open() as disk:
        assert [file.address for file in disk.files()] == [new.address]
