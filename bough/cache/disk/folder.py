"""A tree's folder: made private, owned by one process, with its secret; set aside when what lies in it must not be used."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bough.cache.disk.errors import DiskError, DiskUnwritable
from bough.cache.disk.index import INDEX, INDEX_FILES, Identity, Index, Notes, UnusableIndex, read_index
from bough.cache.disk.keys import SECRET_BYTES, Keys
from bough.cache.disk.lock import FolderLock
from bough.cache.disk.page_files import PAGES, TEMPORARY, PageFiles, make_private_folder, sync_folder, write_private
from bough.cache.disk.rows import Content

SECRET = "secret"
SET_ASIDE = ".set-aside-"
CONTENT = (*INDEX_FILES, PAGES, TEMPORARY, SECRET, f"{SECRET}.tmp")  # the index first: without it nothing is used


_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Model:
    """What a tree is of: a fingerprint, a page size, and what its index notes besides."""

    fingerprint: str
    page_tokens: int
    notes: Notes

    def identity(self, keys: Keys) -> Identity:
        return Identity(self.fingerprint, self.page_tokens, keys.proof(), self.notes)


@dataclass(frozen=True)
class Owned:
    """What only the owner of a folder has: its lock, and its open index."""

    lock: FolderLock
    index: Index

    def close(self) -> None:
        """Empty the log of the index, and release the folder. Raises sqlite3.Error if the log stays as it is."""
        try:
            self.index.checkpoint()
        finally:
            self.index.close()
            self.lock.release()


@dataclass(frozen=True)
class Opened:
    """A folder, and everything that its index knows. If it is only read, `owned` is None.

    `set_aside` says why older content was moved.
    """

    identity: Identity
    keys: Keys
    files: PageFiles
    content: Content
    owned: Owned | None = None
    set_aside: str = ""
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that opened the folder."""
        return self.pid != os.getpid()


def open_folder(folder: Path, model: Model, *, now: float) -> Opened:
    """Take a folder, or raise NotOwner or DiskError. What is damaged, or another model's, is moved beside it first.

    Rows of the index that make no sense are removed from it, and uses after `now` become uses at `now`.
    """
    with translate_errors(folder), telling_unwritable(folder):
        lock = lock_folder(folder)
        try:
            _sync_names(folder)
            try:
                return _open(folder, lock, model, now, set_aside="")
            except UnusableIndex as reason:
                moved = set_aside_content(folder)
                message = f"the tree in {folder} cannot be used: {reason}; it was set aside as {moved.name}"
                return _open(folder, lock, model, now, set_aside=message)
        except BaseException:
            lock.release()
            raise


def read_folder(folder: Path, model: Model, *, now: float) -> Opened:
    """What the index of a folder knows now. Takes no lock and changes nothing; raises DiskError if it cannot be read.

    Where there is no index yet, the tree is empty: its keys are made up, and nothing is found by them.
    """
    with translate_errors(folder):
        secret = read_secret(folder)
        has_index = secret is not None and (folder / INDEX).exists() and (folder / INDEX).stat().st_size > 0
        keys = Keys(secret or secrets.token_bytes(SECRET_BYTES), model.fingerprint, model.page_tokens)
        identity = model.identity(keys)
        content = read_index(folder, identity, keys, now) if has_index else Content()
        return Opened(identity, keys, PageFiles(folder, model.fingerprint), content)


@contextlib.contextmanager
def telling_unwritable(folder: Path) -> Iterator[None]:
    """Raise DiskUnwritable where the system, or SQLite, refuses to write."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise DiskUnwritable(folder, error.strerror or str(error)) from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise
        raise DiskUnwritable(folder, str(error)) from error


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Failures of the system and of SQLite become DiskError, with the path and the reason."""
    try:
        yield
    except (OSError, sqlite3.Error, UnusableIndex) as error:
        raise DiskError(f"{path}: {error}") from error


def lock_folder(folder: Path) -> FolderLock:
    """Make the folder if need be, and take its lock. Raises NotOwner."""
    with telling_unwritable(folder):
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


def _open(folder: Path, lock: FolderLock, model: Model, now: float, *, set_aside: str) -> Opened:
    secret = read_secret(folder)
    if secret is None:
        if (folder / INDEX).exists() and (folder / INDEX).stat().st_size:
            raise UnusableIndex("its secret is missing")
        secret = secrets.token_bytes(SECRET_BYTES)
        write_private(folder / SECRET, secret)
    (folder / SECRET).chmod(0o600)
    keys = Keys(secret, model.fingerprint, model.page_tokens)
    files = PageFiles(folder, model.fingerprint)
    files.prepare()
    index = Index.open(folder / INDEX, model.identity(keys))
    try:
        content = index.read(keys, now)
        with contextlib.suppress(sqlite3.OperationalError):  # on a full disk they stay, and are left out again next time
            index.remove_bad_rows(content.bad_rows, now)
        return Opened(index.identity, keys, files, content, Owned(lock, index), set_aside)
    except BaseException:
        index.close()
        raise
