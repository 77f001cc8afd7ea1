"""Whatever an index holds, a start does not fail on it: rows that make no sense cost themselves and nothing else."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.trees import list_trees, verify_tree
from bough.cache.disk import Disk
from bough.cache.disk.index import INDEX
from bough.cache.disk.keys import PageKeys
from bough.cache.tree.address import POINT, Address
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, point_of, put, put_path, put_point
from tests.fakes import MODELS
from tests.scenarios.world import World

COLUMNS = {
    "copies": ("name", "root", "before", "tokens", "group_index", "start_offset", "end_offset", "nbytes"),
    "points": ("name", "root", "before", "tokens", "end_offset", "reason", "is_kept", "is_superseded", "last_used"),
    "uses": ("id", "last_used"),
    "hits": ("id", "hits"),
}
ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 99, 255, 256, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)),
    *(1.5, -0.5, 1e12, 1e308, math.inf, -math.inf),
    *("", "x", "5", "é" * 50, b"", b"x", b"\xff" * 4, b"\xff" * 16, b"\0" * 16, b"\1\0\0\0" * 300),
)
FIRST = list(range(1, 24))
SECOND = [*FIRST[:9], *range(50, 61)]
OTHERS = list(range(70, 83))


def change(folder: Path, *statements: str) -> None:
    """Run statements on an index whose disk is closed."""
    with contextlib.closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# One row at a time


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE points SET reason = 99",
        "UPDATE points SET reason = -1",
        "UPDATE points SET reason = 'END'",
        "UPDATE points SET is_kept = 7",
        "UPDATE points SET last_used = 9e999",
        "UPDATE points SET last_used = 'yesterday'",
        "UPDATE points SET end_offset = 5",
        "UPDATE points SET root = x'00'",
        "UPDATE points SET tokens = CAST(x'fffe' AS TEXT)",
        "UPDATE points SET name = zeroblob(16)",
    ],
)
def test_a_point_that_makes_no_sense_is_dropped_and_counted(shelf: Shelf, statement: str) -> None:
    with shelf.open() as disk:
        put_path(disk, FIRST)
        put_point(disk, point_of(disk, FIRST[:6]), reason=3, is_kept=False, is_superseded=False)
    change(shelf.folder, statement)

    found = verify_tree(shelf.folder)
    assert len(found.problems) == 1 and "row 1 of points" in found.problems[0] and found.num_files == 6
    with shelf.open() as disk:
        assert disk.points() == [] and len(disk.files()) == 6
        assert disk.counts.bad_rows == 1
    assert len(shelf.warnings) == 1 and "1 rows of the index make no sense" in shelf.warnings[0]
    assert verify_tree(shelf.folder).problems == ()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE copies SET group_index = 'full' WHERE id = 1",
        "UPDATE copies SET group_index = 5000000000 WHERE id = 1",
        "UPDATE copies SET start_offset = -4 WHERE id = 1",
        "UPDATE copies SET end_offset = 9223372036854775807 WHERE id = 1",
        "UPDATE copies SET nbytes = 4611686018427387904 WHERE id = 1",
        "UPDATE copies SET nbytes = -1 WHERE id = 1",
        "UPDATE copies SET tokens = x'ffffffff' WHERE id = 1",
        "UPDATE copies SET tokens = x'000000' WHERE id = 1",
        "UPDATE copies SET before = 3.5 WHERE id = 1",
        "UPDATE copies SET name = CAST(x'ff' AS TEXT) WHERE id = 1",
    ],
)
def test_a_copy_that_makes_no_sense_is_dropped_with_its_file(shelf: Shelf, statement: str) -> None:
    with shelf.open() as disk:
        put_path(disk, FIRST)
    change(shelf.folder, statement)

    assert len(verify_tree(shelf.folder).problems) == 1
    with shelf.open() as disk:
        assert len(disk.files()) == 5 and disk.counts.bad_rows == 1
        assert disk.flush(10)
        assert len(shelf.page_files()) == 5
        assert all(get(disk, disk_file) == content_of(disk_file.address) for disk_file in disk.files())


def test_repairing_removes_rows_that_make_no_sense(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put_path(disk, FIRST)
        put_point(disk, point_of(disk, FIRST[:6]), reason=3, is_kept=False, is_superseded=False)
    change(shelf.folder, "UPDATE points SET reason = 99", "UPDATE copies SET nbytes = 'x' WHERE id = 2")

    found = verify_tree(shelf.folder, repair=True)
    assert len(found.problems) == 2 and found.is_repaired
    assert verify_tree(shelf.folder).problems == ()


def test_a_use_in_the_future_counts_as_now(shelf: Shelf) -> None:
    with shelf.open() as disk:
        put_path(disk, FIRST)
        put_point(disk, point_of(disk, FIRST[:6]), reason=3, is_kept=False, is_superseded=False)
    change(shelf.folder, "UPDATE uses SET last_used = 1e12 WHERE id = 1", "UPDATE points SET last_used = 1e12")

    with shelf.open(clock=lambda: 500.0) as disk:
        assert max(disk_file.last_used for disk_file in disk.files()) == 500.0
        assert [record.last_used for record in disk.points()] == [500.0]
        assert disk.counts.bad_rows == 0


@pytest.mark.parametrize("value", ["'abc'", "''", "'-3'", "'0'", "'99999999999'", "zeroblob(9)"])
def test_a_tree_that_misstates_its_page_size_is_named_and_not_read(shelf: Shelf, value: str) -> None:
    with shelf.open() as disk:
        put_path(disk, FIRST)
    change(shelf.folder, f"UPDATE meta SET value = {value} WHERE key = 'page_tokens'")

    assert "page_tokens" in list_trees(shelf.folder.parent)[0].problem
    assert "page_tokens" in verify_tree(shelf.folder).problems[0]
    with shelf.open() as disk:
        assert disk.counts.set_aside == 1


# Rows that can never be stored


def test_a_row_that_cannot_be_stored_is_dropped_and_the_rest_is_saved(disk: Disk, shelf: Shelf) -> None:
    bad = put(disk, address_of(disk, [9], 0), last_used=math.nan)
    good = put_path(disk, FIRST)
    put_point(disk, point_of(disk, FIRST[:6]), reason=10**30, is_kept=False, is_superseded=False)
    put_point(disk, point_of(disk, FIRST[:7]), reason=3, is_kept=False, is_superseded=False)
    assert not disk.flush(10)  # one of them failed

    assert bad.has_failed and not bad.is_saved
    assert all(disk_file.is_saved for disk_file in good)
    assert [record.address.end for record in disk.points()] == [7]
    assert (disk.counts.bad_rows, disk.counts.failed_writes) == (2, 1)
    assert any("can never be stored" in warning for warning in shelf.warnings)
    assert disk.can_write and not disk.is_failing


def test_after_a_row_that_could_not_be_stored_others_are_written_as_before(disk: Disk) -> None:
    put(disk, address_of(disk, [9], 0), last_used=math.nan)
    disk.flush(10)

    later = put_path(disk, FIRST)
    assert disk.flush(10)
    assert all(disk_file.is_saved for disk_file in later)
    disk.touch(later, math.nan)
    disk.touch(later[:1], 7.0)
    disk.flush(10)
    assert put(disk, address_of(disk, [10], 0)) and disk.flush(10)


# Any values in any columns


def make_tree(folder: Path, model: str) -> Path:
    """A tree on disk: two branches under one salt, a path under another, with states and restore points."""
    with Disk(folder, fingerprint="f", page_tokens=4, budget_bytes=2**30, floor_bytes=0) as disk:
        world = World(MODELS[model], 4, disk=disk)
        world.run(FIRST, [24, 25, 26])
        world.run(SECOND, [62])
        world.run(OTHERS, salt="theirs")
        assert world.cache.upkeep.flush()
    return folder


def damage(folder: Path, chance: random.Random) -> int:
    """Put odd values into some columns, and swap some; returns how many values were changed."""
    keys = PageKeys((folder / "secret").read_bytes(), "f", 4)
    with contextlib.closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as connection:
        connection.text_factory = bytes
        return sum(_damage_one(connection, keys, chance) for _ in range(chance.randint(1, 6)))


def _damage_one(connection: sqlite3.Connection, keys: PageKeys, chance: random.Random) -> bool:
    table = chance.choice(list(COLUMNS))
    column = chance.choice(COLUMNS[table])
    row_ids = [row_id for (row_id,) in connection.execute(f"SELECT rowid FROM {table}")]
    if not row_ids:
        return False
    row_id, value = chance.choice(row_ids), chance.choice(ODD)
    if chance.random() < 0.3:  # a value that makes sense elsewhere
        (value,) = connection.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (chance.choice(row_ids),)).fetchone()
    elif chance.random() < 0.1:
        value = chance.randbytes(chance.choice((1, 4, 16, 64)))
    try:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row_id))
        if chance.random() < 0.5 and table not in ("uses", "hits"):
            _sign(connection, keys, table, row_id)
    except (sqlite3.IntegrityError, OverflowError):
        return False  # the index itself does not take it
    return True


def _sign(connection: sqlite3.Connection, keys: PageKeys, table: str, row_id: int) -> None:
    """Give a row the name that its address has now, as if we had written it ourselves."""
    columns = "root, before, tokens, group_index, start_offset, end_offset"
    if table == "points":
        columns = f"root, before, tokens, {POINT}, end_offset, end_offset"
    row = connection.execute(f"SELECT {columns} FROM {table} WHERE rowid = ?", (row_id,)).fetchone()
    with contextlib.suppress(TypeError, struct.error):
        connection.execute(f"UPDATE {table} SET name = ? WHERE rowid = ?", (keys.name(Address(*row)), row_id))


def start_and_use(folder: Path, model: str) -> int:
    """Open a tree as a start does, and answer from it, rightly; returns how many of its rows were dropped."""
    with Disk(folder, fingerprint="f", page_tokens=4, budget_bytes=2**30, floor_bytes=0) as disk:
        world = World(MODELS[model], 4, disk=disk)
        world.check()
        for prompt, salt in ((FIRST, ""), (SECOND, ""), (OTHERS, "theirs"), ([*FIRST, 24, 25, 90], "")):
            world.run(prompt, [91], salt=salt)
        assert world.cache.upkeep.flush()
        disk.check()
        return disk.counts.bad_rows


def fuzz(folder: Path, model: str, rounds: int) -> None:
    tree = make_tree(folder / "tree", model)
    chance, num_changed, num_dropped = random.Random(f"{model} {rounds}"), 0, 0
    for number in range(rounds):
        damaged = folder / f"damaged-{number}"
        shutil.copytree(tree, damaged)
        num_changed += damage(damaged, chance)
        num_problems = len(verify_tree(damaged).problems)
        bad_rows = start_and_use(damaged, model)
        assert num_problems >= bad_rows
        num_dropped += bad_rows
        left = verify_tree(damaged, repair=True)
        assert not any(problem.startswith("index:") for problem in left.problems)
        assert verify_tree(damaged).problems == ()
        shutil.rmtree(damaged)
    assert num_changed > rounds and num_dropped > 0  # the fuzzer does something


@pytest.mark.parametrize("model", MODELS)
def test_a_start_never_fails_on_what_the_index_holds(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_a_start_never_fails_on_any_of_many_indexes(model: str, tmp_path: Path) -> None:
    fuzz(tmp_path, model, 200)


def test_times_before_the_first_are_no_damage(shelf: Shelf) -> None:
    with shelf.open() as disk:  # the clock was set to 0 for a while
        files = put_path(disk, FIRST)
        disk.touch(files, -3.0)
        put_point(disk, point_of(disk, FIRST[:6]), reason=3, is_kept=False, is_superseded=False, last_used=-3.0)

    assert verify_tree(shelf.folder).problems == ()
    with shelf.open() as disk:
        assert {disk_file.last_used for disk_file in disk.files()} == {0.0}
        assert [record.last_used for record in disk.points()] == [0.0]
