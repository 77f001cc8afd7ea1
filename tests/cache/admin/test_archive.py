"""What one disk exports another one imports, under another secret and salt; nothing else can be smuggled in."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.cache.admin.archive import export_tree, import_tree, measure_archive
from bough.cache.admin.archive_file import read_head
from bough.cache.disk import Disk, DiskError, page_files
from bough.cache.store.format import POINTS, ROWS, ListedPoint, Object, Section, StorePath, decode, list_section
from bough.cache.tree.address import POINT, Address
from bough.tokens import pack
from tests.cache.admin.members import Member, change_object, read_members, write_members
from tests.cache.disk.shelf import Shelf, address_of, content_of, get, point_of, put, put_path, put_point

TOKENS = list(range(100, 110))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Disk]:
    """A second disk, with another secret."""
    with Shelf(tmp_path / "other").open() as disk:
        yield disk
        disk.check()


@pytest.fixture
def archive(disk: Disk, tmp_path: Path) -> Path:
    """An export of two paths, a state and a point under the salt "ours", of a disk that holds more."""
    put_path(disk, TOKENS, salt="ours")
    put(disk, address_of(disk, [*TOKENS[:4], 7, 8], 4, salt="ours"))
    put(disk, address_of(disk, TOKENS[:8], 8, group=1, salt="ours"), last_used=6.0)
    put_path(disk, [55] * 8, salt="theirs")
    put_point(disk, point_of(disk, TOKENS[:6], "ours"), reason=3, is_kept=True, is_superseded=True, last_used=5.0)
    put_point(disk, point_of(disk, [55] * 3, "theirs"), reason=3, is_kept=True, is_superseded=True, last_used=5.0)
    exported = export_tree(disk, tmp_path / "archive.tar", "ours")
    assert (exported.num_items, exported.nbytes, exported.num_skipped) == (5, 5000, 0)
    return tmp_path / "archive.tar"


def test_an_archive_carries_one_salt_to_another_disk(archive: Path, disk: Disk, other: Disk) -> None:
    done = import_tree(other, archive, "mine")

    assert (done.num_items, done.num_skipped, done.problems) == (5, 0, ())
    expected = {
        address_of(other, TOKENS[:4], 0, salt="mine"),
        address_of(other, TOKENS[:8], 4, salt="mine"),
        address_of(other, TOKENS, 8, salt="mine"),
        address_of(other, [*TOKENS[:4], 7, 8], 4, salt="mine"),
        address_of(other, TOKENS[:8], 8, group=1, salt="mine"),
    }
    assert {disk_file.address for disk_file in other.files()} == expected
    assert all(get(other, disk_file) == content_of(disk_file.address) for disk_file in other.files())
    assert all(disk_file.num_users == 0 for disk_file in other.files())
    assert max(disk_file.last_used for disk_file in other.files()) == 6.0
    (record,) = other.points()
    assert record.address == point_of(other, TOKENS[:6], "mine")
    assert (record.reason, record.is_kept, record.is_superseded, record.last_used) == (3, True, True, 5.0)


def test_what_was_imported_is_there_after_a_restart(archive: Path, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "third")
    with shelf.open() as disk:
        assert import_tree(disk, archive).num_items == 5
    with shelf.open() as disk:
        assert len(disk.files()) == 5 and len(disk.points()) == 1


def test_importing_twice_adds_nothing(archive: Path, other: Disk) -> None:
    import_tree(other, archive)
    again = import_tree(other, archive)
    assert (again.num_items, again.num_skipped, again.problems) == (0, 5, ())
    assert other.num_files == 5 and all(disk_file.num_users == 0 for disk_file in other.files())


def test_an_archive_holds_no_salt_secret_or_hash(archive: Path, disk: Disk, shelf: Shelf) -> None:
    content = archive.read_bytes()
    root = disk.root("ours")
    hidden = [b"ours", (shelf.folder / "secret").read_bytes(), root, *disk.digests(root, bytes(64))]
    hidden += [secret.hex().encode() for secret in hidden]
    assert not any(secret in content for secret in hidden)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in archive.parent.iterdir() if file.name.endswith(".tmp")] == []


def test_an_archive_says_what_it_is_of_and_what_it_has(archive: Path) -> None:
    head = read_head(archive)
    assert (head.fingerprint, head.page_tokens) == ("fingerprint-1", 4)
    assert measure_archive(archive).num_items == 5 and measure_archive(archive).nbytes == 5000


def test_a_member_is_an_object_of_the_store_under_its_name(archive: Path) -> None:
    keys = read_head(archive).keys
    path = StorePath(keys, "")
    path.add(pack(TOKENS))
    members = {member.name: member.content for member in read_members(archive)}

    for page in range(2):
        found = decode(keys, path.rows(page), members[keys.name(path.rows(page)).hex()])
        assert [(each.group, each.start, each.end) for each in found.sections] == [(0, 4 * page, 4 * page + 4)]
    kept = decode(keys, path.point(6), members[keys.name(path.point(6)).hex() + ".kept"])
    assert [each.group for each in kept.sections] == [POINT]


def test_what_cannot_be_traced_to_the_root_is_not_exported(disk: Disk, tmp_path: Path) -> None:
    files = put_path(disk, TOKENS)
    assert disk.flush(10)
    disk.drop(files[0])
    done = export_tree(disk, tmp_path / "archive.tar")
    assert (done.num_items, done.num_skipped) == (0, 2)


def test_a_damaged_file_is_left_out_with_what_follows_it_and_stays(
    disk: Disk, shelf: Shelf, other: Disk, tmp_path: Path
) -> None:
    put_path(disk, TOKENS)
    assert disk.flush(10)
    damaged = shelf.page_files()[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")

    done = export_tree(disk, tmp_path / "archive.tar")

    assert done.num_items + done.num_skipped == 3 and done.num_skipped > 0  # it, and what follows it
    with tarfile.open(tmp_path / "archive.tar") as archive:
        assert len(archive.getnames()) == 1 + done.num_items
    back = import_tree(other, tmp_path / "archive.tar")
    assert (back.num_items, back.num_skipped, back.problems) == (done.num_items, 0, ())
    assert disk.num_files == 3 and disk.counts.misses["damaged"] == 0


def while_reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Have something change before the first file is read."""
    changes, read_into = [change], page_files.read_into

    def change_and_read(descriptor: int, view: memoryview) -> int:
        while changes:
            changes.pop()()
        return read_into(descriptor, view)

    monkeypatch.setattr(page_files, "read_into", change_and_read)


def test_what_is_evicted_while_it_is_exported_is_left_out_and_not_called_damaged(
    disk: Disk, other: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = put_path(disk, TOKENS)
    assert disk.flush(10)

    def evict() -> None:
        disk.drop(files[-1])
        assert disk.flush(10)

    while_reading(monkeypatch, evict)
    done = export_tree(disk, tmp_path / "archive.tar")

    assert (done.num_items, done.num_skipped) == (2, 0) and not disk.counts.misses["missing"]
    assert import_tree(other, tmp_path / "archive.tar").num_items == 2


def test_what_takes_the_place_of_a_file_that_is_exported_is_in_the_archive(
    disk: Disk, other: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = files = put_path(disk, TOKENS)
    assert disk.flush(10)

    def cut_and_grow() -> None:
        """As when a branch cuts the first page, and the chat goes on."""
        for tokens, start in ((TOKENS[:2], 0), (TOKENS[:4], 2), ([*TOKENS, 7], 8)):
            put(disk, address_of(disk, tokens, start))
        assert disk.flush(10)
        for file in (first, files[-1]):
            disk.drop(file)
        assert disk.flush(10)

    while_reading(monkeypatch, cut_and_grow)
    done = export_tree(disk, tmp_path / "archive.tar")

    assert done.num_skipped == 0
    import_tree(other, tmp_path / "archive.tar")
    held = [(TOKENS[:2], 0), (TOKENS[:4], 2), (TOKENS[:8], 4), ([*TOKENS, 7], 8)]
    assert {address_of(other, tokens, start) for tokens, start in held} <= {file.address for file in other.files()}


def test_an_export_that_is_no_longer_wanted_ends_and_leaves_nothing(disk: Disk, tmp_path: Path) -> None:
    put_path(disk, TOKENS)
    wanted = iter([True, True, False])
    with pytest.raises(DiskError, match="given up"):
        export_tree(disk, tmp_path / "archive.tar", is_wanted=lambda: next(wanted))
    assert list(tmp_path.glob("*archive.tar*")) == []


def test_an_import_takes_only_what_there_is_room_for(archive: Path, tmp_path: Path) -> None:
    with Shelf(tmp_path / "small").open(budget_bytes=3500) as disk:
        done = import_tree(disk, archive)
        assert (done.num_items, done.num_skipped, done.problems) == (3, 2, ("there was no room for 2 items",))
        assert disk.claimed_bytes <= 3500


def test_an_archive_that_cannot_be_written_leaves_nothing(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="nowhere"):
        export_tree(disk, tmp_path / "nowhere" / "archive.tar")


@pytest.mark.parametrize("changes", [{"fingerprint": "fingerprint-2"}, {"page_tokens": 8}])
def test_an_archive_of_another_model_is_refused(archive: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with Shelf(tmp_path / "strange").open(**changes) as disk:
        with pytest.raises(DiskError, match=next(iter(changes))):
            import_tree(disk, archive)
        assert disk.num_files == 0


def rewrite_head(archive: Path, **changes: Any) -> None:
    members = read_members(archive)
    head = json.loads(members[0].content) | changes
    write_members(archive, [replace(members[0], content=json.dumps(head).encode()), *members[1:]])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"format": None},
        {"byte_order": "middle"},
        {"page_tokens": 0},
        {"page_tokens": 10**30},
        {"page_tokens": True},
        {"page_tokens": "4"},
        {"fingerprint": "x" * 10_000},
        {"fingerprint": 1},
        {"model": "a\0b"},
        {"more": 1},
        {"more": "x" * 100_000},
    ],
    ids=str,
)
def test_a_head_that_makes_no_sense_is_refused(archive: Path, other: Disk, changes: dict[str, Any]) -> None:
    rewrite_head(archive, **changes)
    with pytest.raises(DiskError, match="not an archive"):
        import_tree(other, archive)
    assert other.num_files == 0 and other.points() == []


def test_an_archive_of_the_earlier_format_is_refused_by_its_number(other: Disk, tmp_path: Path) -> None:
    write_members(tmp_path / "old.tar", [Member("manifest.json", b'{"format": 1}')])
    with pytest.raises(DiskError, match="it has format 1, and this version reads format 2: export the tree again"):
        import_tree(other, tmp_path / "old.tar")


def with_address(found: Object, **changes: Any) -> Object:
    return replace(found, address=replace(found.address, **changes))


def with_section(found: Object, **changes: Any) -> Object:
    return replace(found, sections=(replace(found.sections[0], **changes),))


def with_point(found: Object, offset: int, reason: int) -> Object:
    address: Address = replace(found.address, group=POINT, start=4, end=4)
    return Object(address, (list_section(address, [ListedPoint(offset, reason)]),), 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: with_address(found, group=POINTS),
        lambda found: with_address(found, group=0),
        lambda found: with_address(found, start=-4),
        lambda found: with_address(found, start=2),
        lambda found: with_address(found, start=4),
        lambda found: with_address(found, end=2**62),
        lambda found: with_address(found, tokens=b""),
        lambda found: with_address(found, tokens=b"\xff" * 16),
        lambda found: with_address(found, tokens=bytes(17)),
        lambda found: with_address(found, before=bytes(3)),
        lambda found: with_address(found, root=b""),
        lambda found: with_address(found, tokens=pack(range(8)), before=bytes(16), end=8),
        lambda found: with_section(found, group=2**20),
        lambda found: with_section(found, group=ROWS),
        lambda found: with_section(found, start=-1),
        lambda found: with_section(found, end=3),
        lambda found: with_section(found, data=b""),
        lambda found: with_point(found, 4, 99),
        lambda found: with_point(found, 3, 1),
        lambda found: replace(found, sections=(Section(POINT, 4, 4, b"x"),)),
        lambda found: replace(with_point(found, 4, 1), sections=(Section(POINT, 4, 4, b""),)),
    ],
)
def test_an_object_that_makes_no_sense_is_left_out_though_its_seal_is_right(
    archive: Path, other: Disk, change: Callable[[Object], Object]
) -> None:
    change_object(archive, 1, change)  # of the first page, which all others follow
    done = import_tree(other, archive)
    assert done.num_items == 0 and done.num_skipped > 0 and done.problems
    assert other.num_files == 0 and other.points() == []


def test_an_object_that_claims_another_place_has_none(archive: Path, other: Disk) -> None:
    change_object(archive, 1, lambda found: with_address(found, before=bytes(16)))
    done = import_tree(other, archive)
    assert done.num_items == 0 and "have no place" in done.problems[-1]


@pytest.mark.parametrize(("said", "taken"), [(1e12, 500.0), (-7.0, 0.0)])
def test_an_import_was_used_neither_after_now_nor_before_all_time(
    archive: Path, tmp_path: Path, said: float, taken: float
) -> None:
    write_members(archive, [replace(member, modified=said) for member in read_members(archive)])
    with Shelf(tmp_path / "later").open(clock=lambda: 500.0) as disk:
        assert import_tree(disk, archive).num_items == 5
        assert {disk_file.last_used for disk_file in disk.files()} == {taken}
        assert [record.last_used for record in disk.points()] == [taken]


def test_what_is_no_archive_is_refused(other: Disk, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello" * 1000)
    for name in ("text", "missing"):
        with pytest.raises(DiskError, match=name):
            import_tree(other, tmp_path / name)


def test_damaged_objects_are_skipped_and_named(archive: Path, other: Disk) -> None:
    members = read_members(archive)
    last, before = members[-1], members[-2]
    members[-1] = replace(last, content=last.content[:-1] + b"!")
    members[-2] = replace(before, content=before.content + b"longer")
    write_members(archive, [*members, Member("../outside", b"evil")])

    done = import_tree(other, archive)

    assert done.num_skipped == 3 and 0 < done.num_items < 5
    assert done.problems == (
        f"the object {before.name!r} is damaged: its seal is wrong",
        f"the object {last.name!r} is damaged: its seal is wrong",
        "the object '../outside' is damaged: 4 bytes",
    )
    assert not (other.folder.parent / "outside").exists()


def test_an_archive_that_ends_early_gives_what_it_has(archive: Path, other: Disk) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    done = import_tree(other, archive)
    assert 0 < done.num_items < 5
    assert done.problems and "the archive is damaged" in done.problems[0]


def add_member(archive: Path, **facts: Any) -> None:
    """Put a member without content at the end of an archive."""
    info = tarfile.TarInfo("0")
    for name, value in facts.items():
        setattr(info, name, value)
    content = archive.read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % tarfile.BLOCKSIZE)
    archive.write_bytes(content + info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 10_240)


@pytest.mark.parametrize(
    "facts",
    [
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": "../../secret"},
        {"type": tarfile.CHRTYPE},
        {"type": tarfile.DIRTYPE, "name": "../outside"},
        {"type": tarfile.GNUTYPE_SPARSE},
        {"type": tarfile.REGTYPE, "size": 2**62},
        {"type": tarfile.REGTYPE, "size": 100_000},
    ],
)
def test_links_devices_and_sizes_beyond_the_file_end_an_import(archive: Path, other: Disk, facts: dict[str, Any]) -> None:
    add_member(archive, **facts)

    done = import_tree(other, archive)

    assert done.num_items == 5 and len(done.problems) == 1 and "damaged" in done.problems[0]
    assert sorted(path.name for path in other.folder.parent.iterdir()) == sorted([archive.name, "other", "trees"])


def test_of_many_damaged_objects_the_first_are_named(disk: Disk, other: Disk, tmp_path: Path) -> None:
    put_path(disk, list(range(120)))
    archive = tmp_path / "many.tar"
    export_tree(disk, archive)
    head, *members = read_members(archive)
    write_members(archive, [head, *(replace(member, content=b"bad!") for member in members)])

    done = import_tree(other, archive)

    assert done.num_items == 0 and done.num_skipped == 30
    assert len(done.problems) == 21 and done.problems[-1] == "10 more objects are damaged"


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_that_would_be_taken_into_memory_are_refused(other: Disk, tmp_path: Path, format: int) -> None:
    with tarfile.open(tmp_path / "long.tar", "w", format=format) as hostile:
        hostile.addfile(tarfile.TarInfo("x" * 10_000), io.BytesIO())

    with pytest.raises(DiskError, match="no plain file"):
        import_tree(other, tmp_path / "long.tar")
