"""Archives of several disks become one, which holds what any of them does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cache.admin.archive import export_tree, import_tree, measure_archive, merge_archives
from bough.cache.disk import Disk, DiskError
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, point_of, put, put_path, put_point

SHARED = list(range(100, 108))
ONE, TWO = [*SHARED, 1, 2], [*SHARED, 5, 6, 7]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Disk]:
    """A second disk, with another secret."""
    with Shelf(tmp_path / "other").open() as disk:
        yield disk


@pytest.fixture
def sources(disk: Disk, other: Disk, tmp_path: Path) -> list[Path]:
    """Archives of two disks that share the beginning of their paths."""
    for each, tokens in ((disk, ONE), (other, TWO)):
        put_path(each, tokens)
        put_point(each, point_of(each, SHARED), reason=3, is_kept=each is other, is_superseded=True, last_used=5.0)
    put(other, address_of(other, SHARED, 8, group=1), last_used=6.0)
    files = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for each, file in zip((disk, other), files, strict=True):
        export_tree(each, file)
    return files


def test_a_merged_archive_holds_what_any_of_them_does_and_each_item_once(sources: list[Path], tmp_path: Path) -> None:
    merged = tmp_path / "merged.tar"

    merge_archives(sources, merged)

    assert measure_archive(merged).num_items == 5 < sum(measure_archive(each).num_items for each in sources)
    with Shelf(tmp_path / "third").open() as third:
        done = import_tree(third, merged, "mine")
        assert (done.num_items, done.num_skipped, done.problems) == (5, 0, ())
        expected = {
            address_of(third, SHARED[:4], 0, salt="mine"),
            address_of(third, SHARED, 4, salt="mine"),
            address_of(third, ONE, 8, salt="mine"),
            address_of(third, TWO, 8, salt="mine"),
            address_of(third, SHARED, 8, group=1, salt="mine"),
        }
        assert {each.address for each in third.files()} == expected
        assert all(get(third, each) == content_of(each.address) for each in third.files())
        (point,) = third.points()
        assert point.is_kept  # as one of them says
        third.check()


def test_what_one_archive_has_lost_comes_from_another(
    sources: list[Path], tmp_path: Path, shelf: Shelf, disk: Disk
) -> None:
    first = disk.keys.name(address_of(disk, SHARED[:4], 0)).hex()
    (file,) = (file for file in shelf.page_files() if file.name == first)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    export_tree(disk, sources[0])
    assert measure_archive(sources[0]).num_items == 0  # nor anything that follows
    merge_archives(sources, tmp_path / "merged.tar")

    with Shelf(tmp_path / "third").open() as third:
        done = import_tree(third, tmp_path / "merged.tar")

    assert (done.num_items, done.num_skipped, done.problems) == (4, 0, ())


def test_archives_of_different_models_are_not_merged(sources: list[Path], tmp_path: Path) -> None:
    with Shelf(tmp_path / "third").open(fingerprint="fingerprint-2") as third:
        put_path(third, SHARED)
        export_tree(third, tmp_path / "three.tar")

    with pytest.raises(DiskError, match=r"fingerprint='fingerprint-1'.*fingerprint='fingerprint-2'"):
        merge_archives([*sources, tmp_path / "three.tar"], tmp_path / "merged.tar")

    assert not (tmp_path / "merged.tar").exists()


def test_a_merge_that_is_no_longer_wanted_leaves_nothing(sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="given up"):
        merge_archives(sources, tmp_path / "merged.tar", is_wanted=lambda: False)

    assert not list(tmp_path.glob("*merged*"))
