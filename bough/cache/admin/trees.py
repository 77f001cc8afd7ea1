"""Trees on disk: the folders of all models and fingerprints, side by side below one folder, and a look into one of them.

Looking takes no lock and changes nothing that is kept. Every change takes the lock of its tree first, and raises NotOwner
if that is in use or cannot be written.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bough.cache.disk import Disk
from bough.cache.disk.errors import DiskBusy, DiskMiss, NotOwner
from bough.cache.disk.folder import (
    CONTENT,
    SECRET,
    SET_ASIDE,
    FolderLock,
    lock_folder,
    owner_pid,
    read_secret,
    translate_errors,
    translate_unwritable,
)
from bough.cache.disk.index import (
    FORMAT,
    INDEX,
    Identity,
    Index,
    IndexChanges,
    Notes,
    UnusableIndex,
    find_problems,
    index_bytes,
    open_read_only,
    read_index,
    read_meta,
)
from bough.cache.disk.index_rows import MAX_CONTENT_BYTES, MAX_PAGE_TOKENS, IndexContent, decode_groups
from bough.cache.disk.keys import PageKeys
from bough.cache.disk.page_files import PAGES, PageFiles
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import Tiers
from bough.cache.tree.address import DiskFile
from bough.cache.tree.state import Group, Kind

CONFIRMATIONS = 2
"""How often damage in a tree that is in use must be found again."""


@dataclass(frozen=True)
class TreeInfo:
    """The content of one tree's folder. `nbytes` are the page files; `problem` says why it cannot be used, "" if it can.

    `inputs` and `computed_by` are as in `Notes`; empty in a tree that an earlier version of Bough wrote.
    """

    name: str
    folder: Path
    model: str = ""
    fingerprint: str = ""
    page_tokens: int = 0
    num_pages: int = 0
    num_states: int = 0
    num_points: int = 0
    nbytes: int = 0
    index_bytes: int = 0
    last_used: float = 0.0
    owner_pid: int | None = None
    problem: str = ""
    inputs: str = ""
    computed_by: str = ""

    @property
    def is_set_aside(self) -> bool:
        return SET_ASIDE in self.name


@dataclass(frozen=True)
class TreeVerification:
    """The result of reading a tree: whole files and their bytes, problems, and files that the index does not know.

    If it was only read, `not_owner` says why, and `orphans` were not looked for; they are not a problem. If it is in use,
    `owner_pid` is the process that uses it, if the lock file names it.
    """

    num_files: int = 0
    nbytes: int = 0
    orphans: int = 0
    problems: tuple[str, ...] = ()
    is_repaired: bool = False  # whether everything that was wrong has been removed
    is_in_use: bool = False
    owner_pid: int | None = None
    not_owner: str = ""

    def unowned(self, reason: NotOwner) -> TreeVerification:
        """The same of a tree that could not be locked."""
        owner_pid = reason.pid if isinstance(reason, DiskBusy) else None
        return replace(self, is_in_use=isinstance(reason, DiskBusy), owner_pid=owner_pid, not_owner=reason.why)


def list_trees(folder: Path) -> list[TreeInfo]:
    """Every tree below a folder, by name, including those that cannot be used."""
    with translate_errors(folder):
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        return [_inspect(child) for child in children if (child / INDEX).exists() or (child / SECRET).exists()]


def remove_tree(folder: Path) -> int:
    """Delete a tree for good and return the bytes that were freed; other files in its folder stay."""
    with translate_errors(folder), translate_unwritable(folder), FolderLock(folder) as lock:
        content = [folder / name for name in CONTENT if (folder / name).exists()]
        freed_bytes = sum(map(_files_bytes, content))
        for entry in content:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        lock.remove()
        with contextlib.suppress(OSError):
            folder.rmdir()
    return freed_bytes


def make_room(folder: Path, keep: Path, budget_bytes: int) -> int:
    """Remove unused trees other than `keep` while together they take over half the budget; returns what they still take.

    Trees that were set aside go first, then the least recently used. Raises NotOwner if `keep` cannot be taken: nothing is
    removed for a tree that is only read.
    """
    with translate_errors(keep), lock_folder(keep):
        others = [tree for tree in list_trees(folder) if tree.folder.resolve() != keep.resolve()]
        total_bytes = sum(tree.nbytes + tree.index_bytes for tree in others)
        for tree in sorted(others, key=lambda tree: (not tree.is_set_aside, tree.last_used)):
            if total_bytes <= budget_bytes / 2:
                break
            with contextlib.suppress(DiskBusy):
                remove_tree(tree.folder)
                total_bytes -= tree.nbytes + tree.index_bytes
        return total_bytes


def verify_tree(
    folder: Path, on_file: Callable[[int], None] = lambda nbytes: None, repair: bool = False
) -> TreeVerification:
    """Read and check every file of a tree; `on_file` is called with each size. With `repair`, damaged files are removed.

    A tree that is in use, or whose folder cannot be written, is checked as it is found; `repair` then raises NotOwner.
    """
    try:
        with translate_errors(folder), translate_unwritable(folder), FolderLock(folder):
            return _verify(folder, on_file, repair=repair)
    except NotOwner as reason:
        if repair:
            raise
        with translate_errors(folder):
            return _verify(folder, on_file, is_owned=False).unowned(reason)


def _verify(
    folder: Path, on_file: Callable[[int], None], *, is_owned: bool = True, repair: bool = False
) -> TreeVerification:
    """Check a tree. The owner of another may be changing it: a file that leaves the index meanwhile was not damaged."""
    broken: list[str] = []
    try:
        with open_read_only(folder) as connection:
            identity = _read_identity(folder, read_meta(connection))
            broken = find_problems(connection)
        page_files, keys = PageFiles(folder, identity.fingerprint), _read_keys(folder, identity)
        content = read_index(folder, identity, keys, time.time())
        damaged = _find_damaged(page_files, content, on_file)
        for _ in range(CONFIRMATIONS if damaged and not is_owned else 0):
            files = read_index(folder, identity, keys, time.time()).files  # a file is deleted after its row
            gone = [name for name in damaged if name not in files or not _find_damage(page_files, files[name])]
            for name in gone:
                del damaged[name], content.files[name]
        orphans = list(_find_orphans(page_files, content)) if is_owned else []
        if repair:
            _repair(folder, identity, content, [*orphans, *map(page_files.path, damaged)], damaged)
    except (UnusableIndex, sqlite3.DatabaseError) as error:
        return TreeVerification(problems=tuple(f"index: {each}" for each in (*broken, error)))
    whole = [disk_file.nbytes for name, disk_file in content.files.items() if name not in damaged]
    problems = [f"index: {each}" for each in (*broken, *content.bad_rows)]
    problems += [f"{name.hex()}: {problem}" for name, problem in damaged.items()]
    return TreeVerification(len(whole), sum(whole), len(orphans), tuple(problems), repair and not broken)


def _find_orphans(page_files: PageFiles, content: IndexContent) -> Iterator[Path]:
    for batch in page_files.names():
        yield from (Path(file) for file, name in batch if name not in content.files)


def _repair(
    folder: Path, identity: Identity, content: IndexContent, files: Sequence[Path], damaged: Iterable[bytes]
) -> None:
    """Remove bad rows, those of damaged files, and then these files; and what a killed process left half written."""
    PageFiles(folder, identity.fingerprint).prepare()
    with contextlib.closing(Index(folder / INDEX, identity, _read_keys(folder, identity))) as index:
        index.remove_bad_rows(content.bad_rows, time.time())
        index.apply(IndexChanges(removed=list(damaged)))
    for file in files:
        file.unlink(missing_ok=True)


def _find_damage(page_files: PageFiles, disk_file: DiskFile) -> str:
    """What is wrong with a file; "" if nothing is."""
    try:
        page_files.read(disk_file)
    except DiskMiss as miss:
        return miss.reason
    return ""


def _find_damaged(page_files: PageFiles, content: IndexContent, on_file: Callable[[int], None]) -> dict[bytes, str]:
    """The damaged files of an index by their names, each with what is wrong."""
    damaged = {}
    for name, disk_file in content.files.items():
        if problem := _find_damage(page_files, disk_file):
            damaged[name] = problem
        on_file(disk_file.nbytes)
    return damaged


def _inspect(folder: Path) -> TreeInfo:
    """The content of a folder, as far as it can be read."""
    tree = TreeInfo(folder.name, folder, index_bytes=index_bytes(folder), owner_pid=owner_pid(folder))
    try:
        if not (folder / INDEX).exists():
            raise UnusableIndex("it has no index")
        with open_read_only(folder) as connection:
            meta = read_meta(connection)
            tree = replace(
                tree,
                model=meta.get("model", ""),
                inputs=meta.get("inputs", ""),
                computed_by=meta.get("computed_by", ""),
                fingerprint=meta.get("fingerprint", ""),
                page_tokens=_read_page_tokens(meta),
            )
            tree = _count(tree, connection)
        problem = "" if meta.get("format") == str(FORMAT) else f"it has format {meta.get('format')}, and {FORMAT} is wanted"
    except (sqlite3.Error, UnusableIndex, OSError, ValueError) as error:
        tree, problem = replace(tree, nbytes=_files_bytes(folder / PAGES)), f"it cannot be read: {error}"
    if tree.is_set_aside:
        problem = "it was set aside" + (f"; {problem}" if problem else "")
    return replace(tree, problem=problem)


def _read_page_tokens(meta: dict[str, str]) -> int:
    """The page size that an index claims; raises UnusableIndex if it is not a valid one."""
    text = meta.get("page_tokens", "")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= MAX_PAGE_TOKENS):
        raise UnusableIndex(f"its page_tokens is {text[:40]!r}")
    return int(text)


def _count(tree: TreeInfo, connection: sqlite3.Connection) -> TreeInfo:
    num_files, num_states, nbytes = connection.execute(
        "SELECT count(*), coalesce(sum(start_offset = end_offset), 0), total(nbytes) FROM copies "
        f"WHERE typeof(nbytes) = 'integer' AND nbytes BETWEEN 0 AND {2 * MAX_CONTENT_BYTES}"
    ).fetchone()
    num_points, point_used = _count_used(connection, "points")
    _, file_used = _count_used(connection, "uses")
    return replace(
        tree,
        num_pages=num_files - num_states,
        num_states=num_states,
        num_points=num_points,
        nbytes=int(nbytes),
        last_used=float(min(max(file_used, point_used), time.time())),
    )


def _count_used(connection: sqlite3.Connection, table: str) -> tuple[int, float]:
    """How many rows a table has, and the last use among those whose time makes sense."""
    number, last_used = connection.execute(
        f"SELECT count(*), max(iif(typeof(last_used) IN ('real', 'integer'), last_used, 0)) FROM {table}"
    ).fetchone()
    return number, max(0.0, last_used or 0.0)


def _read_identity(folder: Path, meta: dict[str, str]) -> Identity:
    if read_secret(folder) is None:
        raise UnusableIndex("its secret is missing")
    if meta.get("format") != str(FORMAT):
        raise UnusableIndex(f"it has format {meta.get('format')}, and {FORMAT} is wanted")
    return Identity(meta.get("fingerprint", ""), _read_page_tokens(meta), Notes.of_meta(meta))


def _read_keys(folder: Path, identity: Identity) -> PageKeys:
    return PageKeys(read_secret(folder) or b"", identity.fingerprint, identity.page_tokens)


def _files_bytes(folder: Path) -> int:
    """The bytes of a file, or of all files in a folder and below; those that vanish meanwhile count nothing."""
    total = 0
    for file in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


@dataclass(frozen=True)
class _NoContent:
    """Stands for an engine where nothing is ever in memory: only its groups are used."""

    groups: Sequence[Group]
    has_host: bool = False


@contextlib.contextmanager
def open_stored(folder: Path, fingerprint: str, page_tokens: int, ttl_s: float | None = None) -> Iterator[PrefixCache]:
    """The cache that a process with the model would begin with, to be viewed and explained; it has no lanes.

    It is restored from the index without the model, and never changed. The tree may be in use. Raises DiskError if it
    cannot be read.
    """
    with translate_errors(folder), open_read_only(folder) as connection:
        groups = decode_groups(read_meta(connection).get("groups", ""))
    looking = NotOwner(f"{folder} is only looked at", "only looked at")
    with Disk(
        folder, fingerprint=fingerprint, page_tokens=page_tokens, budget_bytes=0, ttl_s=ttl_s, not_owner=looking
    ) as disk:
        store: Any = _NoContent(groups or _guess_groups(disk.files()))
        cache = PrefixCache(store, [], page_tokens=page_tokens, tiers=Tiers(store, disk=disk), ttl_s=ttl_s)
        cache.restore()
        yield cache


def _guess_groups(files: Iterable[DiskFile]) -> list[Group]:
    """The groups of an index that does not list them: a file without rows is a state, and all rows count as needed."""
    kinds = {file.address.group: Kind.RECURRENT if file.address.start == file.address.end else Kind.FULL for file in files}
    return [Group(index, kind) for index, kind in sorted(kinds.items())]
