"""A tree's folder: private, owned by one process at a time, with its secret; set aside if its content must not be used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bough.cache.disk import page_files
from bough.cache.disk.errors import DiskBusy, DiskError, DiskUnwritable
from bough.cache.disk.index import INDEX, INDEX_FILES, Identity, Index, UnusableIndex, read_index
from bough.cache.disk.index_rows import IndexContent
from bough.cache.disk.keys import SECRET_BYTES, PageKeys
from bough.cache.disk.page_files import PageFiles
from bough.system.processes import is_alive

LOCK = "lock"
SECRET = "secret"
SET_ASIDE = ".set-aside-"
CONTENT = (
    *INDEX_FILES,
    page_files.PAGES,
    page_files.TEMPORARY,
    SECRET,
    f"{SECRET}.tmp",
)  # the index first: without it nothing is used

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderLock:
    """Holds `folder/lock` from construction to `release`, with its process id in it; raise DiskBusy if another does.

    A forked child has a descriptor of the same lock, which stays its parent's until that releases it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._pid = os.getpid()
        while True:
            self._descriptor = page_files.open_private(self._file, os.O_RDWR)
            try:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise DiskBusy(folder, _recorded_pid(folder)) from None
                if self._is_in_place():
                    self._record(f"{self._pid}\n".encode())
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # the tree was removed between open and lock: begin again

    def release(self) -> None:
        """Release the lock; the file stays, empty. A second call does nothing. A forked child only closes its own."""
        if self._descriptor >= 0:
            if self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    self._record(b"")
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        self._file.unlink()
        self.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _record(self, content: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, content)


def _recorded_pid(folder: Path) -> int | None:
    try:
        return int((folder / LOCK).read_bytes()[:32])
    except (OSError, ValueError):
        return None


def owner_pid(folder: Path) -> int | None:
    """The process that seems to have the tree open, found without touching the lock; None if none has."""
    pid = _recorded_pid(folder)
    return pid if pid is not None and is_alive(pid) else None


@dataclass(frozen=True)
class FolderOwnership:
    """The lock and the open index, which only the owner of a folder has."""

    lock: FolderLock
    index: Index

    def close(self) -> None:
        """Empty the log of the index, and release the folder. Raise sqlite3.Error if the log stays as it is."""
        try:
            self.index.checkpoint()
        finally:
            self.index.close()
            self.lock.release()


@dataclass(frozen=True)
class OpenFolder:
    """A folder and the content of its index. `owned` is None if it is only read; `set_aside` says why content was moved."""

    keys: PageKeys
    files: PageFiles
    content: IndexContent
    owned: FolderOwnership | None = None
    set_aside: str = ""


def open_folder(folder: Path, identity: Identity, *, now: float) -> OpenFolder:
    """Take a folder, or raise NotOwner or DiskError. Damaged content, or another model's, is moved beside it first.

    Invalid rows of the index are removed from it, and uses after `now` become uses at `now`.
    """
    with translate_errors(folder), translate_unwritable(folder):
        lock = lock_folder(folder)
        try:
            for above in (folder.parent.parent, folder.parent):  # a killed process may have made them and not synced
                with contextlib.suppress(PermissionError):  # another user's, and not new
                    page_files.sync_folder(above)
            try:
                return _open(folder, lock, identity, now, set_aside="")
            except UnusableIndex as reason:
                moved = set_aside_content(folder)
                message = f"the tree in {folder} cannot be used: {reason}; it was set aside as {moved.name}"
                return _open(folder, lock, identity, now, set_aside=message)
        except BaseException:
            lock.release()
            raise


def read_folder(folder: Path, identity: Identity, *, now: float) -> OpenFolder:
    """The content of a folder's index now. Take no lock and change nothing; raise DiskError if it cannot be read.

    Without an index the tree is empty, and its keys are random.
    """
    with translate_errors(folder):
        secret = read_secret(folder)
        has_index = secret is not None and (folder / INDEX).exists() and (folder / INDEX).stat().st_size > 0
        keys = PageKeys(secret or secrets.token_bytes(SECRET_BYTES), identity.fingerprint, identity.page_tokens)
        content = read_index(folder, identity, keys, now) if has_index else IndexContent()
        return OpenFolder(keys, PageFiles(folder, identity.fingerprint), content)


@contextlib.contextmanager
def translate_unwritable(folder: Path) -> Iterator[None]:
    """Raise DiskUnwritable if the system, or SQLite, refuses to write."""
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
    """Turn failures of the system and of SQLite into DiskError, with the path and the reason."""
    try:
        yield
    except (OSError, sqlite3.Error, UnusableIndex) as error:
        raise DiskError(f"{path}: {error}") from error


def lock_folder(folder: Path) -> FolderLock:
    """Take the lock of a folder, which is made if it does not exist. Raise NotOwner."""
    with translate_unwritable(folder):
        while True:
            page_files.make_private_folder(folder)
            try:
                return FolderLock(folder)
            except FileNotFoundError:
                continue  # another process removed the folder just now


def read_secret(folder: Path) -> bytes | None:
    """The secret of a tree, or None if it has none; raise UnusableIndex if its size is wrong."""
    try:
        secret = (folder / SECRET).read_bytes()
    except FileNotFoundError:
        return None
    if len(secret) != SECRET_BYTES:
        raise UnusableIndex(f"its secret has {len(secret)} bytes")
    return secret


def set_aside_content(folder: Path) -> Path:
    """Move the content of a locked folder into a new one beside it."""
    number = 1
    while (target := folder.with_name(f"{folder.name}{SET_ASIDE}{number}")).exists():
        number += 1
    page_files.make_private_folder(target)
    for name in CONTENT:
        if (folder / name).exists():
            (folder / name).rename(target / name)
    return target


def _open(folder: Path, lock: FolderLock, identity: Identity, now: float, *, set_aside: str) -> OpenFolder:
    secret = read_secret(folder)
    if secret is None:
        if (folder / INDEX).exists() and (folder / INDEX).stat().st_size:
            raise UnusableIndex("its secret is missing")
        secret = secrets.token_bytes(SECRET_BYTES)
        page_files.write_private(folder / SECRET, secret)
    (folder / SECRET).chmod(0o600)
    keys = PageKeys(secret, identity.fingerprint, identity.page_tokens)
    files = PageFiles(folder, identity.fingerprint)
    files.prepare()
    index = Index(folder / INDEX, identity, keys)
    try:
        content = index.read(now)
        with contextlib.suppress(sqlite3.OperationalError):  # on a full disk they stay, and are left out again next time
            index.remove_bad_rows(content.bad_rows, now)
        return OpenFolder(keys, files, content, FolderOwnership(lock, index), set_aside)
    except BaseException:
        index.close()
        raise
