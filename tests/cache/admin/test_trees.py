"""The trees of many models side by side: shown, checked, removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bough.cache.admin.trees import list_trees, make_room, remove_tree, verify_tree
from bough.cache.disk import Disk, DiskBusy, DiskError
from bough.cache.disk.index import INDEX, index_bytes
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, point_of, put, put_path, put_point


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Path]:
    """A folder for trees; nothing may be left locked in it."""
    yield tmp_path / "trees"
    assert all(tree.owner_pid is None for tree in list_trees(tmp_path / "trees"))


def make_tree(trees: Path, name: str, num_tokens: int = 8, last_used: float = 1.0) -> Path:
    with Shelf(trees / name).open(fingerprint=f"fingerprint of {name}", model=name) as disk:
        files = put_path(disk, range(num_tokens))
        disk.touch(files, last_used)
    return trees / name


def reopen(folder: Path) -> Disk:
    return Shelf(folder).open(fingerprint=f"fingerprint of {folder.name}", model=folder.name)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.rglob("*")}


def test_trees_are_shown_without_being_touched(trees: Path) -> None:
    make_tree(trees, "b", last_used=20.0)
    with Shelf(trees / "a").open(model="model a") as disk:
        put_path(disk, range(8))
        put(disk, address_of(disk, range(8), 8, group=1), last_used=30.0)
        put_point(disk, point_of(disk, range(8)), reason=0, is_kept=True, is_superseded=False, last_used=9.0)
        assert disk.flush(10)
        before = snapshot(trees)
        first, second = list_trees(trees)

        assert snapshot(trees) == before
        assert (first.name, first.folder, first.model) == ("a", trees / "a", "model a")
        assert (first.num_pages, first.num_states, first.num_points, first.page_tokens) == (2, 1, 1, 4)
        assert (first.nbytes, first.index_bytes) == (disk.used_bytes, index_bytes(disk.folder))
        assert (first.last_used, first.owner_pid, first.problem) == (30.0, os.getpid(), "")
        assert (second.name, second.fingerprint, second.owner_pid) == ("b", "fingerprint of b", None)
        assert (second.num_pages, second.last_used) == (2, 20.0)


def test_there_may_be_no_trees_at_all(trees: Path) -> None:
    assert list_trees(trees) == []
    trees.mkdir()
    (trees / "something else").mkdir()
    (trees / "a file").write_text("")
    assert list_trees(trees) == []


def test_trees_that_cannot_be_used_are_shown_with_their_problem(trees: Path) -> None:
    folder = make_tree(trees, "a")
    Shelf(folder).open(fingerprint="another").close()
    make_tree(trees, "b")
    (trees / "b" / INDEX).write_bytes(b"nonsense" * 1000)
    whole, aside, broken = list_trees(trees)

    assert (whole.problem, aside.is_set_aside) == ("", True)
    assert aside.problem == "it was set aside" and aside.num_pages == 2
    assert "cannot be read" in broken.problem
    assert broken.nbytes == Shelf(trees / "b").page_bytes() > 0


def test_a_whole_tree_is_verified_file_by_file(trees: Path) -> None:
    folder = make_tree(trees, "a", 12)
    sizes: list[int] = []
    found = verify_tree(folder, sizes.append)

    assert (found.num_files, found.nbytes, found.problems, found.orphans) == (3, sum(sizes), (), 0)
    assert sum(sizes) == Shelf(folder).page_bytes()


def test_damage_is_named_and_repaired(trees: Path) -> None:
    folder = make_tree(trees, "a", 16)
    cut, gone, *rest = Shelf(folder).page_files()
    os.truncate(cut, 500)
    gone.unlink()
    (cut.parent / ("cd" * 16)).write_bytes(b"stray")

    found = verify_tree(folder)
    assert (found.num_files, found.orphans) == (2, 1)
    assert sorted(found.problems) == sorted([f"{cut.name}: truncated", f"{gone.name}: missing"])
    assert cut.exists()

    verify_tree(folder, repair=True)
    again = verify_tree(folder)
    assert (again.num_files, again.problems, again.orphans) == (2, (), 0)
    assert Shelf(folder).page_files() == rest


def test_an_index_that_is_nonsense_is_a_problem_not_a_crash(trees: Path) -> None:
    folder = make_tree(trees, "a")
    (folder / INDEX).write_bytes(b"nonsense" * 1000)
    assert "index" in verify_tree(folder).problems[0]


def test_an_index_that_is_nonsense_in_the_middle_is_a_problem_too(trees: Path) -> None:
    tree = make_tree(trees, "tree", num_tokens=1600)
    content = bytearray((tree / INDEX).read_bytes())
    content[3 * 8192 : 6 * 8192] = b"nonsense" * (3 * 1024)
    (tree / INDEX).write_bytes(content)
    assert "index: database disk image is malformed" in verify_tree(tree).problems


def test_a_tree_in_use_is_neither_repaired_nor_removed(trees: Path) -> None:
    folder = make_tree(trees, "a")
    with reopen(folder) as disk:
        for act in (partial(verify_tree, repair=True), remove_tree):
            with pytest.raises(DiskBusy):
                act(folder)
        assert get(disk, disk.files()[0]) == content_of(disk.files()[0].address)


def test_what_an_owner_deletes_and_writes_while_its_tree_is_verified_is_no_damage(trees: Path) -> None:
    folder = make_tree(trees, "a", num_tokens=16)
    with reopen(folder) as disk:
        known = disk.files()
        in_the_way = known[-1]
        damaged = next(file for file in Shelf(folder).page_files() if file.name == disk.keys.name(known[0].address).hex())
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

        def change(nbytes: int) -> None:
            """At the first file: the last one goes, and another comes."""
            if disk.has(in_the_way):
                put(disk, address_of(disk, [99], 0))
                disk.use(in_the_way)
                disk.drop(in_the_way)
                assert disk.flush(10)

        found = verify_tree(folder, on_file=change)

    assert (found.num_files, found.orphans) == (2, 0)
    assert found.problems == (f"{damaged.name}: damaged",)
    assert found.is_in_use and found.owner_pid == os.getpid()


def test_a_removed_tree_is_gone_and_what_is_not_ours_stays(trees: Path) -> None:
    folder, other = make_tree(trees, "a"), make_tree(trees, "b")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    (other / "notes.txt").write_text("mine")

    assert remove_tree(folder) == size
    remove_tree(other)

    assert not folder.exists()
    assert [file.name for file in other.iterdir()] == ["notes.txt"]
    with pytest.raises(DiskError):
        remove_tree(folder)


def test_a_tree_that_was_removed_can_be_made_anew(trees: Path) -> None:
    remove_tree(make_tree(trees, "a"))
    assert verify_tree(make_tree(trees, "a")).num_files == 2


def test_room_is_made_from_trees_set_aside_then_from_the_oldest(trees: Path) -> None:
    for name, last_used in (("keep", 1.0), ("old", 2.0), ("young", 4.0), ("used", 3.0)):
        make_tree(trees, name, last_used=last_used)
    Shelf(trees / "young").open(fingerprint="another").close()
    make_tree(trees, "young.set-aside-2", last_used=99.0)
    sizes = {tree.name: tree.nbytes + tree.index_bytes for tree in list_trees(trees)}
    others = sum(sizes.values()) - sizes["keep"]

    def left() -> set[str]:
        return {tree.name for tree in list_trees(trees)}

    assert make_room(trees, trees / "keep", 2 * others) == others
    assert left() == sizes.keys()
    others -= sizes["young.set-aside-1"]
    assert make_room(trees, trees / "keep", 2 * others) == others
    assert left() == sizes.keys() - {"young.set-aside-1"}
    with reopen(trees / "old"):
        make_room(trees, trees / "keep", 0)
        assert left() == {"keep", "old"}
    assert make_room(trees, trees / "keep", 0) == 0
    assert left() == {"keep"}


def test_a_tree_whose_log_lost_its_shared_memory_is_shown_and_verified(trees: Path) -> None:
    """A power failure may leave the log, and not what SQLite keeps beside it, which nobody syncs."""
    with Shelf(trees / "whole").open() as disk:
        put_path(disk, range(8))
        assert disk.flush(10)
        shutil.copytree(trees / "whole", trees / "cut", ignore=shutil.ignore_patterns("*-shm", "lock"))
    assert (trees / "cut" / f"{INDEX}-wal").stat().st_size
    cut, _ = list_trees(trees)
    assert (cut.problem, cut.num_pages) == ("", 2)
    assert (verify_tree(trees / "cut").problems, verify_tree(trees / "cut").num_files) == ((), 2)


def test_a_tree_whose_log_has_only_its_header_is_shown_and_verified(trees: Path) -> None:
    """A process was killed, or the power failed, when it had just begun the log."""
    make_tree(trees, "tree")
    with Shelf(trees / "other").open() as disk:
        put_path(disk, range(8))
        assert disk.flush(10)
        log = (trees / "other" / f"{INDEX}-wal").read_bytes()
    (trees / "tree" / f"{INDEX}-wal").write_bytes(log[:32])
    (trees / "tree" / f"{INDEX}-shm").write_bytes(b"")
    _, tree = list_trees(trees)
    assert (tree.problem, tree.num_pages) == ("", 2)
    assert verify_tree(trees / "tree").problems == ()
