"""Many trees: the folders of all models and fingerprints, side by side below one folder.

Looking takes no lock and changes nothing that is kept. Whatever changes a tree takes its lock first, and raises NotOwner
if it is in use or cannot be written.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bough.cache.disk.errors import DiskBusy, DiskMiss, NotOwner
from bough.cache.disk.folder import (
    CONTENT,
    SECRET,
    SET_ASIDE,
    lock_folder,
    read_secret,
    telling_unwritable,
    translate_errors,
)
from bough.cache.disk.index import (
    FORMAT,
    INDEX,
    Changes,
    Identity,
    Index,
    Notes,
    UnusableIndex,
    find_problems,
    index_bytes,
    open_read_only,
    read_index,
    read_meta,
)
from bough.cache.disk.keys import Keys
from bough.cache.disk.lock import FolderLock, owner_pid
from bough.cache.disk.page_files import PAGES, PageFiles
from bough.cache.disk.rows import MAX_CONTENT_BYTES, MAX_PAGE_TOKENS, Content
from bough.cache.tree.address import DiskFile

CONFIRMATIONS = 2
"""How often damage in a tree that is in use must be found again."""


@dataclass(frozen=True)
class TreeInfo:
    """What one tree's folder holds. `nbytes` are the page files; `problem` says why it cannot be used, "" if it can.

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
class Verified:
    """What reading a tree found: whole files and their bytes, what was wrong, and files that the index does not know."""

    num_files: int
    nbytes: int
    problems: tuple[str, ...]
    orphans: int
    is_repaired: bool = False  # whether everything that was wrong has been removed
    not_owner: NotOwner | None = None  # why it was only read, as far as it held still; then orphans are not looked for


def list_trees(folder: Path) -> list[TreeInfo]:
    """Every tree below a folder, also those that cannot be used, by name."""
    with translate_errors(folder):
        children = sorted(folder.iterdir()) if folder.is_dir() else []
        return [_inspect(child) for child in children if (child / INDEX).exists() or (child / SECRET).exists()]


def remove_tree(folder: Path) -> int:
    """Delete a tree for good and return the bytes that were freed; what else lies in its folder stays."""
    with translate_errors(folder), telling_unwritable(folder), FolderLock(folder) as lock:
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
        return _make_room(folder, keep, budget_bytes)


def _make_room(folder: Path, keep: Path, budget_bytes: int) -> int:
    others = [tree for tree in list_trees(folder) if tree.folder.resolve() != keep.resolve()]
    total_bytes = sum(tree.nbytes + tree.index_bytes for tree in others)
    for tree in sorted(others, key=lambda tree: (not tree.is_set_aside, tree.last_used)):
        if total_bytes <= budget_bytes / 2:
            break
        with contextlib.suppress(DiskBusy):
            remove_tree(tree.folder)
            total_bytes -= tree.nbytes + tree.index_bytes
    return total_bytes


def verify_tree(folder: Path, on_file: Callable[[int], None] = lambda nbytes: None, repair: bool = False) -> Verified:
    """Read and check every file of a tree; `on_file` is called with each size. With `repair`, what is damaged is removed.

    A tree that is in use, or whose folder cannot be written, is checked as it is found; `repair` then raises NotOwner.
    """
    try:
        return _verify_owned(folder, on_file, repair)
    except NotOwner as reason:
        if repair:
            raise
        with translate_errors(folder):
            return replace(_verify_unowned(folder, on_file), not_owner=reason)


def _verify_owned(folder: Path, on_file: Callable[[int], None], repair: bool) -> Verified:
    with translate_errors(folder), telling_unwritable(folder), FolderLock(folder):
        try:
            with open_read_only(folder) as connection:
                identity = _read_identity(folder, read_meta(connection))
            index = Index.open(folder / INDEX, identity)
        except (UnusableIndex, sqlite3.DatabaseError) as error:
            return Verified(0, 0, (f"index: {error}",), 0)
        with contextlib.closing(index):
            return _Verifying(folder, index).run(on_file, repair)


def _verify_unowned(folder: Path, on_file: Callable[[int], None]) -> Verified:
    """Check a tree that its owner may be changing: a file that has left the index meanwhile was not damaged."""
    try:
        with open_read_only(folder) as connection:
            identity = _read_identity(folder, read_meta(connection))
            broken = find_problems(connection)
        return _Looking(folder, identity).run(on_file, broken)
    except (UnusableIndex, sqlite3.DatabaseError) as error:
        return Verified(0, 0, (f"index: {error}",), 0)


class _Looking:
    """One verification under way of a folder that is not ours."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder, self._identity = folder, identity
        self._keys = Keys(read_secret(folder) or b"", identity.fingerprint, identity.page_tokens)
        self._files = PageFiles(folder, identity.fingerprint)

    def run(self, on_file: Callable[[int], None], broken: Sequence[str]) -> Verified:
        content = self._read()
        suspects = {}
        for name, disk_file in content.files.items():
            if problem := _find_damage(self._files, name, disk_file):
                suspects[name] = problem
            on_file(disk_file.nbytes)
        whole = [disk_file.nbytes for name, disk_file in content.files.items() if name not in suspects]
        problems = [f"index: {each}" for each in (*broken, *content.bad_rows)]
        damaged = self._confirm(suspects)
        return Verified(len(whole), sum(whole), (*problems, *map(_describe_damage, damaged.items())), 0)

    def _confirm(self, suspects: dict[bytes, str]) -> dict[bytes, str]:
        """The files that are damaged while the index has them: one is deleted after its row, and written before it."""
        for _ in range(CONFIRMATIONS if suspects else 0):
            files = self._read().files
            found = {name: _find_damage(self._files, name, files[name]) for name in suspects if name in files}
            suspects = {name: problem for name, problem in found.items() if problem}
        return suspects

    def _read(self) -> Content:
        return read_index(self._folder, self._identity, self._keys, time.time())


def _find_damage(page_files: PageFiles, name: bytes, disk_file: DiskFile) -> str:
    """What is wrong with a file; "" if nothing is."""
    try:
        payload = page_files.read(name, disk_file.address)
    except DiskMiss as miss:
        return miss.reason
    is_whole = page_files.size(disk_file.address, len(payload)) == disk_file.nbytes
    return "" if is_whole else "its size is not what the index says"


def _describe_damage(damage: tuple[bytes, str]) -> str:
    name, problem = damage
    return f"{name.hex()}: {problem}"


class _Verifying:
    """One verification under way; the folder is locked."""

    def __init__(self, folder: Path, index: Index) -> None:
        secret = read_secret(folder)
        assert secret is not None
        self._index = index
        self._keys = Keys(secret, index.identity.fingerprint, index.identity.page_tokens)
        self._files = PageFiles(folder, index.identity.fingerprint)
        self._files.prepare()

    def run(self, on_file: Callable[[int], None], repair: bool) -> Verified:
        now = time.time()
        broken = [f"index: {problem}" for problem in self._index.problems()]
        try:
            content = self._index.read(self._keys, now)
        except UnusableIndex as error:
            return Verified(0, 0, (*broken, f"index: {error}"), 0)
        files = content.files
        problems = broken + [f"index: {row}" for row in content.bad_rows]
        damaged = {}
        for name, disk_file in files.items():
            if problem := _find_damage(self._files, name, disk_file):
                damaged[name] = problem
            on_file(disk_file.nbytes)
        orphans = [Path(file) for batch in self._files.names() for file, name in batch if name not in files]
        if repair:
            self._index.remove_bad_rows(content.bad_rows, now)
            self._index.apply(Changes(removed=list(damaged)))
            for file in (*orphans, *map(self._files.path, damaged)):
                file.unlink(missing_ok=True)
        whole = [disk_file.nbytes for name, disk_file in files.items() if name not in damaged]
        is_repaired = repair and not broken
        return Verified(
            len(whole), sum(whole), (*problems, *map(_describe_damage, damaged.items())), len(orphans), is_repaired
        )


def _inspect(folder: Path) -> TreeInfo:
    """What a folder holds, as far as it can be told."""
    tree = TreeInfo(folder.name, folder, index_bytes=index_bytes(folder), owner_pid=owner_pid(folder))
    try:
        if not (folder / INDEX).exists():
            raise UnusableIndex("it has no index")
        with open_read_only(folder) as connection:
            meta = read_meta(connection)
            tree = _count(_describe(tree, meta), connection)
        problem = "" if meta.get("format") == str(FORMAT) else f"it has format {meta.get('format')}, and {FORMAT} is wanted"
    except (sqlite3.Error, UnusableIndex, OSError, ValueError) as error:
        tree, problem = replace(tree, nbytes=_files_bytes(folder / PAGES)), f"it cannot be read: {error}"
    if tree.is_set_aside:
        problem = "it was set aside" + (f"; {problem}" if problem else "")
    return replace(tree, problem=problem)


def _describe(tree: TreeInfo, meta: dict[str, str]) -> TreeInfo:
    return replace(
        tree,
        model=meta.get("model", ""),
        inputs=meta.get("inputs", ""),
        computed_by=meta.get("computed_by", ""),
        fingerprint=meta.get("fingerprint", ""),
        page_tokens=_read_page_tokens(meta),
    )


def _read_page_tokens(meta: dict[str, str]) -> int:
    """The page size that an index says it has; raises UnusableIndex if it is none."""
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
    secret = read_secret(folder)
    if secret is None:
        raise UnusableIndex("its secret is missing")
    if meta.get("format") != str(FORMAT):
        raise UnusableIndex(f"it has format {meta.get('format')}, and {FORMAT} is wanted")
    page_tokens, fingerprint = _read_page_tokens(meta), meta.get("fingerprint", "")
    proof = Keys(secret, fingerprint, page_tokens).proof()
    return Identity(fingerprint, page_tokens, proof, Notes.of_meta(meta))


def _files_bytes(folder: Path) -> int:
    """What a file takes, or all files in a folder and below; those that vanish meanwhile count nothing."""
    total = 0
    for file in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            total += 0 if file.is_dir() else file.lstat().st_size
    return total
