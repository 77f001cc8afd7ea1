"""The index of a tree on disk: which files there are, of what, and when each was last used. SQLite.

Every change is one transaction, safe on the disk when `apply` returns. A row is written after its file and removed before
it, so that a row always has its file. The table `copies` has one row for each file; its rows are large (they hold tokens)
and never change. When a file was last used stands apart, in `uses`, so that noting it writes little. `secure_delete`
overwrites what is deleted.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from urllib.parse import quote

from bough.cache.disk.descriptors import open_private
from bough.cache.disk.keys import Keys
from bough.cache.disk.rows import BadRow, Content, PointRecord, read_content
from bough.cache.tree.address import DiskFile
from bough.system.processes import without_gc

FORMAT = 1
INDEX = "index.sqlite"
INDEX_FILES = (f"{INDEX}-wal", f"{INDEX}-shm", INDEX)
READ_ATTEMPTS, READ_AGAIN_S = 5, 0.2
APPLICATION_ID = 0x426F7567  # "Boug", in the header of the SQLite file

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
"""Changes that were left out, by name, and why."""


class UnusableIndex(Exception):
    """The index is damaged, or of another format, model or secret: it must not be used as it is."""


@dataclass(frozen=True)
class Notes:
    """What an index says of its tree besides: the model's name and groups, and the code that computed its pages.

    `inputs` is a hash of all that the fingerprint covers but the code: trees that have it in common are of one model with
    one choice of settings, computed by different code.
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
    """What index and user must agree on. `notes` may differ: they serve commands without the model, and people."""

    fingerprint: str
    page_tokens: int
    proof: str
    notes: Notes

    @property
    def model(self) -> str:
        return self.notes.model

    def require(self, found: Mapping[str, str]) -> None:
        """Raise UnusableIndex if an index says that it is of something else."""
        wanted = self.as_meta()
        for key, value in wanted.items():
            if found.get(key) != value:
                raise UnusableIndex(f"its {key} is {found.get(key)!r}, and {value!r} is wanted")

    def as_meta(self) -> dict[str, str]:
        """What an index says of itself."""
        return {
            "format": str(FORMAT),
            "fingerprint": self.fingerprint,
            "page_tokens": str(self.page_tokens),
            "proof": self.proof,
        }


@dataclass
class Changes:
    """What one transaction does: removals first, then additions, then uses."""

    removed: Sequence[bytes] = ()
    saved: Sequence[tuple[bytes, DiskFile]] = ()
    points: Mapping[bytes, PointRecord | None] = field(default_factory=dict)
    used: Sequence[tuple[bytes, float]] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.saved or self.points or self.used)


class Index:
    """An open index. One thread at a time uses it."""

    def __init__(self, file: Path, identity: Identity, connection: sqlite3.Connection) -> None:
        self.file = file
        self.identity = identity
        self._connection = connection

    @classmethod
    def open(cls, file: Path, identity: Identity) -> Index:
        """Open or begin an index. Raises UnusableIndex, or sqlite3.Error or OSError if the system fails."""
        index = cls(file, identity, _connect(file))
        try:
            with _unusable_if_damaged():
                index._prepare()
        except BaseException:
            index._connection.close()
            raise
        return index

    @property
    def nbytes(self) -> int:
        return index_bytes(self.file.parent)

    def read(self, keys: Keys, now: float) -> Content:
        """Everything in the index, checked row by row; raises UnusableIndex if it cannot be read at all."""
        with _unusable_if_damaged(), without_gc():
            return read_content(self._connection, keys, now)

    def apply(self, changes: Changes) -> Rejected:
        """Make all the changes, or none and raise sqlite3.Error.

        A change that SQLite will never take, because a value in it does not fit, is left out and returned.
        """
        try:
            with self._transaction() as connection:
                for _, make in _changes_of(changes):
                    make(connection)
        except _BAD_VALUES:
            return self._apply_singly(changes)
        return {}

    def _apply_singly(self, changes: Changes) -> Rejected:
        rejected: Rejected = {}
        with self._transaction() as connection:
            for name, make in _changes_of(changes):
                connection.execute("SAVEPOINT change")
                try:
                    make(connection)
                except _BAD_VALUES as error:
                    connection.execute("ROLLBACK TO change")
                    rejected[name] = str(error)
                connection.execute("RELEASE change")
        return rejected

    def remove_bad_rows(self, rows: Iterable[BadRow], now: float) -> None:
        """Remove rows that make no sense, and write `now` for every later use; raises sqlite3.Error."""
        with self._transaction() as connection:
            for row in rows:
                connection.execute(f"DELETE FROM {row.table} WHERE rowid = ?", (row.row_id,))
            for table in ("uses", "points"):
                connection.execute(f"UPDATE {table} SET last_used = ? WHERE last_used > ?", (now, now))

    def clear(self, root: bytes | None) -> None:
        """Remove every row, or every row of one root, so that nothing of them remains in the index or its log.

        `secure_delete` has overwritten them when the log is empty; the file shrinks only when half of it is free, so that
        clearing a small tree does not cost a copy of all the others.
        """
        with self._transaction() as connection:
            if root is None:
                for table in ("uses", "copies", "points"):
                    connection.execute(f"DELETE FROM {table}")
            else:
                connection.execute("DELETE FROM uses WHERE id IN (SELECT id FROM copies WHERE root = ?)", (root,))
                connection.execute("DELETE FROM copies WHERE root = ?", (root,))
                connection.execute("DELETE FROM points WHERE root = ?", (root,))
        if not self.checkpoint():
            raise sqlite3.OperationalError("another process reads the index: what was deleted is still in its log")
        free, total = (_scalar(self._connection, f"PRAGMA {name}") for name in ("freelist_count", "page_count"))
        if 2 * free >= total:
            self._connection.execute("VACUUM")
            self.checkpoint()

    def checkpoint(self) -> bool:
        """Move everything from the log into the index itself and empty the log; False if another process still reads it."""
        is_busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not is_busy

    def close(self) -> None:
        self._connection.close()

    def problems(self) -> list[str]:
        """What SQLite itself finds wrong with the file."""
        return find_problems(self._connection)

    def _prepare(self) -> None:
        for pragma in ("page_size = 8192", "journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        if _scalar(self._connection, "SELECT count(*) FROM sqlite_master") == 0:
            self._begin(self.identity.as_meta())
        found = read_meta(self._connection)
        self.identity.require(found)
        notes = {key: value or found.get(key, "") for key, value in asdict(self.identity.notes).items()}
        if any(found.get(key, "") != value for key, value in notes.items()):
            with self._transaction() as connection:
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", notes.items())
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk can still be read from
            # A process may have been killed between a commit and its sync: files must not be deleted on the word of that.
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _begin(self, meta: Mapping[str, str]) -> None:
        with self._transaction() as connection:
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def open_read_only(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads and takes no lock of ours, while an owner may be writing; raises sqlite3.Error.

    Without a log no process is writing, and the file can be read as it is. Otherwise the log is read too. Then SQLite keeps
    its memory of the log beside it, as for any reader: after a power failure that may be gone, and the log be torn.
    """
    log = folder / f"{INDEX}-wal"
    mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
    connection = sqlite3.connect(f"file:{quote(str(folder.absolute() / INDEX))}?{mode}", uri=True, isolation_level=None)
    connection.text_factory = _read_text
    try:
        yield connection
    finally:
        connection.close()


def read_index(folder: Path, identity: Identity, keys: Keys, now: float) -> Content:
    """Everything in an index that another process may be writing, as it was at one moment. Changes nothing.

    What that process does may make reading fail once (it begins the index, or moves its log into it): then it is read
    again. Raises UnusableIndex or sqlite3.Error if that does not help.
    """
    for attempt in range(READ_ATTEMPTS):
        time.sleep(READ_AGAIN_S if attempt else 0)
        try:
            with _unusable_if_damaged(), without_gc(), open_read_only(folder) as connection:
                connection.execute("BEGIN")
                identity.require(read_meta(connection))
                return read_content(connection, keys, now)
        except (UnusableIndex, sqlite3.Error):
            if attempt == READ_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def find_problems(connection: sqlite3.Connection) -> list[str]:
    """What SQLite itself finds wrong with an index."""
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """What the index says of itself; raises UnusableIndex if it is not one of ours."""
    if _scalar(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise UnusableIndex("it was not written by Bough")
    return {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def index_bytes(folder: Path) -> int:
    """What the index and its log occupy."""
    total = 0
    for name in INDEX_FILES:
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _connect(file: Path) -> sqlite3.Connection:
    """SQLite gives the files beside the index the mode of the index itself, so that is made first."""
    os.close(open_private(file, os.O_RDWR))
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.text_factory = _read_text
    return connection


def _read_text(value: bytes) -> str:
    """Text in a column; what is no UTF-8 must not make the other rows unreadable."""
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


def _changes_of(changes: Changes) -> Iterator[tuple[bytes, Callable[[sqlite3.Connection], object]]]:
    """Each change by the name of what it is of, as something that makes it, in order."""
    for name in changes.removed:
        yield name, partial(_remove, name)
    for name, file in changes.saved:
        yield name, partial(_add, name, file)
    for name, record in changes.points.items():
        yield name, partial(_change_point, name, record)
    for name, last_used in changes.used:
        yield name, partial(_note_use, name, last_used)


def _remove(name: bytes, connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM uses WHERE id = (SELECT id FROM copies WHERE name = ?)", (name,))
    connection.execute("DELETE FROM copies WHERE name = ?", (name,))


def _add(name: bytes, file: DiskFile, connection: sqlite3.Connection) -> None:
    address = file.address
    connection.execute(
        "INSERT INTO copies VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET nbytes = excluded.nbytes",
        (name, address.root, address.before, address.tokens, address.group, address.start, address.end, file.nbytes),
    )
    connection.execute("INSERT OR REPLACE INTO uses SELECT id, ? FROM copies WHERE name = ?", (file.last_used, name))


def _change_point(name: bytes, record: PointRecord | None, connection: sqlite3.Connection) -> None:
    if record is None:
        connection.execute("DELETE FROM points WHERE name = ?", (name,))
        return
    address, numbers = record.address, (record.reason, record.is_kept, record.is_superseded, record.last_used)
    connection.execute(
        "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (name, address.root, address.before, address.tokens, address.end, *numbers),
    )


def _note_use(name: bytes, last_used: float, connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO uses SELECT id, ? FROM copies WHERE name = ? "
        "ON CONFLICT (id) DO UPDATE SET last_used = excluded.last_used",
        (last_used, name),
    )
