"""A tree's folder: made private, owned by one process, with its secret; set aside when what lies in it must not be used."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bough.cache.disk.errors import DiskError
from bough.cache.disk.index import INDEX, INDEX_FILES, Identity, Index, UnusableIndex
from bough.cache.disk.keys import SECRET_BYTES, Keys
from bough.cache.disk.lock import FolderLock
from bough.cache.disk.page_files import PAGES, TEMPORARY, PageFiles, make_private_folder, sync_folder, write_private
from bough.cache.disk.rows import Content

SECRET = "secret"
SET_ASIDE = ".set-aside-"
CONTENT = (*INDEX_FILES, PAGES, TEMPORARY, SECRET, f"{SECRET}.tmp")  # the index first: without it nothing is used


@dataclass(frozen=True)
class Opened:
    """A folder that we have locked, and everything that its index knows. `set_aside` says why older content was moved."""

    lock: FolderLock
    keys: Keys
    files: PageFiles
    index: Index
    content: Content
    set_aside: str


def open_folder(folder: Path, fingerprint: str, model: str, page_tokens: int, *, now: float) -> Opened:
    """Take a folder, or raise DiskBusy or DiskError. What is damaged, or another model's, is moved beside it first.

    Rows of the index that make no sense are removed from it, and uses after `now` become uses at `now`.
    """
    with translate_errors(folder):
        lock = lock_folder(folder)
        try:
            _sync_names(folder)
            try:
                return _open(folder, lock, fingerprint, model, page_tokens, now, set_aside="")
            except UnusableIndex as reason:
                moved = set_aside_content(folder)
                message = f"the tree in {folder} cannot be used: {reason}; it was set aside as {moved.name}"
                return _open(folder, lock, fingerprint, model, page_tokens, now, set_aside=message)
        except BaseException:
            lock.release()
            raise


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Failures of the system and of SQLite become DiskError, with the path and the reason."""
    try:
        yield
    except (OSError, sqlite3.Error, UnusableIndex) as error:
        raise DiskError(f"{path}: {error}") from error


def lock_folder(folder: Path) -> FolderLock:
    """Make the folder if need be, and take its lock."""
    while True:
        make_private_folder(folder)
        try:
            return FolderLock(folder)
        except FileNotFoundError:
            continue  # another process removed the folder just now


def _sync_names(folder: Path) -> None:
    """Make the names of a tree's folder and of the one that it lies in safe, also if a killed process made them."""
    for above in (folder.parent.parent, folder.parent):
        with contextlib.suppress(PermissionError):  # another user's, and not new
            sync_folder(above)


def read_secret(folder: Path) -> bytes | None:
    """The secret of a tree, or None if it has none; raises UnusableIndex if it is not one."""
    try:
        secret = (folder / SECRET).read_bytes()
    except FileNotFoundError:
        return None
    if len(secret) != SECRET_BYTES:
        raise UnusableIndex(f"its secret has {len(secret)} bytes")
    return secret


def set_aside_content(folder: Path) -> Path:
    """Move what lies in a locked folder into a new one beside it."""
    number = 1
    while (target := folder.with_name(f"{folder.name}{SET_ASIDE}{number}")).exists():
        number += 1
    make_private_folder(target)
    for name in CONTENT:
        if (folder / name).exists():
            (folder / name).rename(target / name)
    return target


def _open(
    folder: Path, lock: FolderLock, fingerprint: str, model: str, page_tokens: int, now: float, *, set_aside: str
) -> Opened:
    secret = read_secret(folder)
    if secret is None:
        if (folder / INDEX).exists() and (folder / INDEX).stat().st_size:
            raise UnusableIndex("its secret is missing")
        secret = secrets.token_bytes(SECRET_BYTES)
        write_private(folder / SECRET, secret)
    (folder / SECRET).chmod(0o600)
    keys = Keys(secret, fingerprint, page_tokens)
    files = PageFiles(folder, fingerprint)
    files.prepare()
    index = Index.open(folder / INDEX, Identity(fingerprint, model, page_tokens, keys.proof()))
    try:
        content = index.read(keys, now)
        with contextlib.suppress(sqlite3.OperationalError):  # on a full disk they stay, and are left out again next time
            index.remove_bad_rows(content.bad_rows, now)
        return Opened(lock, keys, files, index, content, set_aside)
    except BaseException:
        index.close()
        raise
