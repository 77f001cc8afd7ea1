"""The index of a tree on disk, in SQLite: its files and restore points, by name, and when each was last used.

Every change is one transaction, safe on the disk when `apply` returns. A row is written after its file and removed before
it, so that a row always has its file. The table `copies` has one row for each file; its rows are large (they hold tokens)
and never change. The time of a file's last use has a table of its own, `uses`, so that updating it writes little; so has
the number of its uses, `hits`, which indexes of earlier versions lack until they are opened for writing.
`secure_delete` overwrites deleted rows.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from urllib.parse import quote

from bough.cache.disk.index_rows import BadRow, IndexContent, read_content
from bough.cache.disk.keys import PageKeys
from bough.cache.disk.page_files import open_private
from bough.cache.tree.address import DiskFile, PointRecord
from bough.system.processes import without_gc

FORMAT = 1
INDEX = "index.sqlite"
INDEX_FILES = (f"{INDEX}-wal", f"{INDEX}-shm", INDEX)
READ_ATTEMPTS, READ_AGAIN_S = 5, 0.2
APPLICATION_ID = 0x426F7567  # "Boug", in the header of the SQLite file

_HITS = "CREATE TABLE IF NOT EXISTS hits (id INTEGER PRIMARY KEY, hits INTEGER NOT NULL)"
_SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE copies (id INTEGER PRIMARY KEY, name BLOB UNIQUE NOT NULL, root BLOB NOT NULL, before BLOB NOT NULL, "
    "tokens BLOB NOT NULL, group_index INTEGER NOT NULL, start_offset INTEGER NOT NULL, end_offset INTEGER NOT NULL, "
    "nbytes INTEGER NOT NULL)",
    "CREATE TABLE uses (id INTEGER PRIMARY KEY, last_used REAL NOT NULL)",
    "CREATE TABLE points (name BLOB PRIMARY KEY, root BLOB NOT NULL, before BLOB NOT NULL, tokens BLOB NOT NULL, "
    "end_offset INTEGER NOT NULL, reason INTEGER NOT NULL, is_kept INTEGER NOT NULL, is_superseded INTEGER NOT NULL, "
    "last_used REAL NOT NULL)",
)
_REMOVE_HITS = "DELETE FROM hits WHERE id = (SELECT id FROM copies WHERE name = ?)"
_REMOVE_USE = "DELETE FROM uses WHERE id = (SELECT id FROM copies WHERE name = ?)"
_REMOVE_FILE = "DELETE FROM copies WHERE name = ?"
_ADD_FILE = (
    "INSERT INTO copies VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET nbytes = excluded.nbytes"
)
_ADD_USE = "INSERT OR REPLACE INTO uses SELECT id, ? FROM copies WHERE name = ?"
_NOTE_HITS = "INSERT OR REPLACE INTO hits SELECT id, ? FROM copies WHERE name = ?"
_REMOVE_POINT = "DELETE FROM points WHERE name = ?"
_ADD_POINT = "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_NOTE_USE = (
    "INSERT INTO uses SELECT id, ? FROM copies WHERE name = ? ON CONFLICT (id) DO UPDATE SET last_used = excluded.last_used"
)
_FAILURES = {  # of the system, not of the index: moving the index away would not help
    getattr(sqlite3, f"SQLITE_{name}") for name in ("PERM", "BUSY", "LOCKED", "NOMEM", "READONLY", "FULL", "CANTOPEN")
}

_BAD_VALUES = (  # raised for a value that the index cannot hold, whenever it is tried
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    UnicodeError,
)

Rejected = dict[bytes, str]
"""Changes that were left out: name to reason."""

_Statement = tuple[str, tuple[object, ...]]


class UnusableIndex(Exception):
    """The index is damaged, or of another format, model or secret: it must not be used as it is."""


@dataclass(frozen=True)
class Notes:
    """More about a tree: the model's name and groups, and the code that computed its pages.

    `inputs` is a hash of everything in the fingerprint except the code: trees with the same `inputs` have the same model
    and settings, and were computed by different code.
    """

    model: str = ""
    groups: str = ""
    inputs: str = ""
    computed_by: str = ""

    @classmethod
    def of_meta(cls, meta: Mapping[str, str]) -> Notes:
        return cls(**{each.name: meta.get(each.name, "") for each in fields(cls)})


@dataclass(frozen=True)
class Identity:
    """Which model a tree belongs to. An index may have other `notes`: they are for people and for commands."""

    fingerprint: str
    page_tokens: int
    notes: Notes

    @property
    def model(self) -> str:
        return self.notes.model

    def require(self, found: Mapping[str, str], keys: PageKeys) -> None:
        """Raise UnusableIndex if an index is of another format or model, or has names made with another secret."""
        for key, value in self.as_meta(keys).items():
            if found.get(key) != value:
                raise UnusableIndex(f"its {key} is {found.get(key)!r}, and {value!r} is wanted")

    def as_meta(self, keys: PageKeys) -> dict[str, str]:
        return {
            "format": str(FORMAT),
            "fingerprint": self.fingerprint,
            "page_tokens": str(self.page_tokens),
            "proof": keys.proof(),
        }


@dataclass
class IndexChanges:
    """One transaction: removals first, then additions, then uses."""

    removed: Sequence[bytes] = ()
    saved: Sequence[DiskFile] = ()
    points: Mapping[bytes, PointRecord | None] = field(default_factory=dict)
    used: Sequence[DiskFile] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.saved or self.points or self.used)


class Index:
    """An open index, used by one thread at a time."""

    def __init__(self, file: Path, identity: Identity, keys: PageKeys) -> None:
        """Open or create an index. Raise UnusableIndex, or sqlite3.Error or OSError if the system fails."""
        os.close(open_private(file, os.O_RDWR))  # SQLite gives the files beside the index the mode of the index
        self.identity, self.keys = identity, keys
        self.connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=5.0)
        self.connection.text_factory = _read_text
        try:
            with _unusable_if_damaged():
                self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def read(self, now: float) -> IndexContent:
        """Everything in the index, checked row by row; raise UnusableIndex if it cannot be read at all."""
        with _unusable_if_damaged(), without_gc():
            return read_content(self.connection, self.keys, now)

    def apply(self, changes: IndexChanges) -> Rejected:
        """Make all the changes, or none and raise sqlite3.Error.

        A change with a value that SQLite cannot store is left out and returned.
        """
        try:
            with self._transaction() as connection:
                for _, statements in _statements_of(changes):
                    for statement in statements:
                        connection.execute(*statement)
        except _BAD_VALUES:
            return self._apply_singly(changes)
        return {}

    def _apply_singly(self, changes: IndexChanges) -> Rejected:
        rejected: Rejected = {}
        with self._transaction() as connection:
            for name, statements in _statements_of(changes):
                connection.execute("SAVEPOINT change")
                try:
                    for statement in statements:
                        connection.execute(*statement)
                except _BAD_VALUES as error:
                    connection.execute("ROLLBACK TO change")
                    rejected[name] = str(error)
                connection.execute("RELEASE change")
        return rejected

    def remove_bad_rows(self, rows: Iterable[BadRow], now: float) -> None:
        """Remove invalid rows, and set every later use to `now`; raise sqlite3.Error."""
        with self._transaction() as connection:
            for row in rows:
                connection.execute(f"DELETE FROM {row.table} WHERE rowid = ?", (row.row_id,))
            for table in ("uses", "points"):
                connection.execute(f"UPDATE {table} SET last_used = ? WHERE last_used > ?", (now, now))

    def clear(self, root: bytes | None) -> None:
        """Remove every row, or every row of one root, so that nothing of them remains in the index or its log.

        `secure_delete` overwrites them as the log is emptied. The file shrinks only when half of it is free, so that
        clearing a small tree does not copy all the others.
        """
        with self._transaction() as connection:
            if root is None:
                for table in ("uses", "hits", "copies", "points"):
                    connection.execute(f"DELETE FROM {table}")
            else:
                for table in ("uses", "hits"):
                    connection.execute(f"DELETE FROM {table} WHERE id IN (SELECT id FROM copies WHERE root = ?)", (root,))
                connection.execute("DELETE FROM copies WHERE root = ?", (root,))
                connection.execute("DELETE FROM points WHERE root = ?", (root,))
        if not self.checkpoint():
            raise sqlite3.OperationalError("another process reads the index: what was deleted is still in its log")
        free, total = (_scalar(self.connection, f"PRAGMA {name}") for name in ("freelist_count", "page_count"))
        if 2 * free >= total:
            self.connection.execute("VACUUM")
            self.checkpoint()

    def checkpoint(self) -> bool:
        """Move the log into the index itself and empty it; False if another process still reads it."""
        is_busy, _, _ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not is_busy

    def close(self) -> None:
        self.connection.close()

    def _prepare(self) -> None:
        for pragma in ("page_size = 8192", "journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            self.connection.execute(f"PRAGMA {pragma}").fetchall()
        if _scalar(self.connection, "SELECT count(*) FROM sqlite_master") == 0:
            with self._transaction() as connection:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.executemany("INSERT INTO meta VALUES (?, ?)", self.identity.as_meta(self.keys).items())
        found = read_meta(self.connection)
        self.identity.require(found, self.keys)
        with contextlib.suppress(sqlite3.OperationalError):  # as below
            self.connection.execute(_HITS)
        notes = {key: value or found.get(key, "") for key, value in asdict(self.identity.notes).items()}
        if any(found.get(key, "") != value for key, value in notes.items()):
            with self._transaction() as connection:
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", notes.items())
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk can still be read from
            # A process may have been killed between a commit and its sync: no file may be deleted because of that commit.
            self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def open_read_only(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads and does not take the folder's lock; an owner may be writing. Raise sqlite3.Error.

    Without a log no process is writing, and the file is read as it is. Otherwise the log is read too, and SQLite keeps its
    index of the log in a file beside it, which a power failure may lose or tear.
    """
    log = folder / f"{INDEX}-wal"
    mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
    connection = sqlite3.connect(f"file:{quote(str(folder.absolute() / INDEX))}?{mode}", uri=True, isolation_level=None)
    connection.text_factory = _read_text
    try:
        yield connection
    finally:
        connection.close()


def read_index(folder: Path, identity: Identity, keys: PageKeys, now: float) -> IndexContent:
    """Everything in an index that another process may be writing, as of one moment. Change nothing.

    Reading fails while that process creates the index or moves its log into it, and is then tried again. Raise
    UnusableIndex or sqlite3.Error after the last attempt.
    """
    for attempt in range(READ_ATTEMPTS):
        time.sleep(READ_AGAIN_S if attempt else 0)
        try:
            with _unusable_if_damaged(), without_gc(), open_read_only(folder) as connection:
                connection.execute("BEGIN")
                identity.require(read_meta(connection), keys)
                return read_content(connection, keys, now)
        except (UnusableIndex, sqlite3.Error):
            if attempt == READ_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def find_problems(connection: sqlite3.Connection) -> list[str]:
    """The problems that SQLite's integrity check finds in an index."""
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """The keys and values of an index's table `meta`; raise UnusableIndex if it is not one of ours."""
    if _scalar(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise UnusableIndex("it was not written by Bough")
    return {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def index_bytes(folder: Path) -> int:
    total = 0
    for name in INDEX_FILES:
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _read_text(value: bytes) -> str:
    """Text in a column; invalid UTF-8 must not make the other rows unreadable."""
    return value.decode("utf-8", "replace")


@contextlib.contextmanager
def _unusable_if_damaged() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _FAILURES:
            raise
        raise UnusableIndex(f"SQLite says: {error}") from error


def _scalar(connection: sqlite3.Connection, query: str) -> int:
    (value,) = connection.execute(query).fetchone()
    return int(value)


def _statements_of(changes: IndexChanges) -> Iterator[tuple[bytes, list[_Statement]]]:
    """The statements of each change with the name that it concerns, in order."""
    for name in changes.removed:
        yield name, [(_REMOVE_USE, (name,)), (_REMOVE_HITS, (name,)), (_REMOVE_FILE, (name,))]
    for file in changes.saved:
        name, at = file.name, file.address
        row = (name, at.root, at.before, at.tokens, at.group, at.start, at.end, file.nbytes)
        yield name, [(_ADD_FILE, row), (_ADD_USE, (file.last_used, name)), (_NOTE_HITS, (file.hits, name))]
    for name, record in changes.points.items():
        if record is None:
            yield name, [(_REMOVE_POINT, (name,))]
        else:
            at, numbers = record.address, (record.reason, record.is_kept, record.is_superseded, record.last_used)
            yield name, [(_ADD_POINT, (name, at.root, at.before, at.tokens, at.end, *numbers))]
    for file in changes.used:
        yield file.name, [(_NOTE_USE, (file.last_used, file.name)), (_NOTE_HITS, (file.hits, file.name))]
