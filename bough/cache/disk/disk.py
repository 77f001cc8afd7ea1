"""The disk tier: pages and states of one model in files, found again after a restart.

A `Disk` owns one folder, or only reads one that it cannot own. One thread, the writer, does all the writing; those of the
`reader` read what is to be loaded. Any thread may put, look and wait. What makes a saved file useless (`take`, `mark_lost`,
`clear`) is left to the engine's thread, which decides by what is saved. Nothing here raises because of a failing disk but
`open`, waiting for a clear and, as a miss, `take` and `open_payload`. Only `open_payload`, `flush`, `settle` and `close`
wait for the disk, and the engine's thread calls none of them while requests run.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from bough.cache.disk import page_files
from bough.cache.disk.errors import DAMAGED, MISSING, DiskMiss, NotOwner, ReadOnlyTree, Warnings
from bough.cache.disk.folder import Model, Opened, open_folder, read_folder, translate_errors
from bough.cache.disk.index import Notes
from bough.cache.disk.keys import HASH_BYTES
from bough.cache.disk.ledger import Counts, Ledger, Snapshot
from bough.cache.disk.page_files import KeepReading
from bough.cache.disk.read_only import NoWriter
from bough.cache.disk.reader import Read, Reader
from bough.cache.disk.rows import PointRecord, encode_groups
from bough.cache.disk.writer import Writer
from bough.cache.tree.address import POINT, Address, DiskFile
from bough.cache.tree.state import Buffer, Group
from bough.cache.tree.tokens import TOKEN_BYTES

log = logging.getLogger(__name__)


class Disk:
    """The store of one (model, fingerprint), from `open` to `close`. `read_only` says why it is only read, if it is."""

    def __init__(
        self,
        folder: Path,
        opened: Opened,
        *,
        budget_bytes: int,
        floor_bytes: int,
        ttl_s: float | None,
        clock: Callable[[], float],
        warnings: Warnings,
        read_only: str = "",
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.read_only = read_only
        self.identity = opened.identity
        self.keys = opened.keys
        self.page_tokens = opened.keys.page_tokens
        self._opened = opened
        self._clock = clock
        self._warnings = warnings
        self._ledger = Ledger(opened.keys, opened.content.files, opened.content.points)
        if opened.set_aside:
            self.counts.set_aside += 1
            warnings.say("set aside", opened.set_aside)
        if bad_rows := opened.content.bad_rows:
            self.counts.bad_rows += len(bad_rows)
            warnings.say(
                "rows", f"{folder}: {len(bad_rows)} rows of the index make no sense and are dropped; {bad_rows[0]}"
            )
        if ttl_s is not None:
            self._ledger.expire(clock() - ttl_s)
        self._is_closed = False
        self._full = ""  # why the file system takes no more, if it does not
        self._writer = self._make_writer()
        self.reader: Reader[DiskFile, bytearray] = Reader(self._read)

    def _make_writer(self) -> Writer | NoWriter:
        owned = self._opened.owned
        if owned is None:
            return NoWriter(self._ledger, self.folder, self.read_only)
        writer = Writer(self._ledger, owned.index, self._opened.files, self._warnings, self.folder)
        writer.start()
        return writer

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        fingerprint: str,
        model: str = "",
        page_tokens: int,
        groups: Sequence[Group] = (),
        inputs: str = "",
        computed_by: str = "",
        budget_bytes: int,
        floor_bytes: int = 2 * 2**30,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = log.warning,
        not_owner: NotOwner | None = None,
    ) -> Disk:
        """Take a folder and read its index. Raises NotOwner if it cannot be taken, DiskError if the system fails.

        Content that is damaged, or of another fingerprint, format or page size, is moved to a folder beside it. With
        `not_owner`, what was raised before, the folder is only read as it is now: nothing of it is ever changed, and a file
        that its owner deletes later is a miss. The budget is then what there is. The index notes model, groups, inputs and
        the code that computes.
        """
        tree = Model(fingerprint, page_tokens, Notes(model, encode_groups(groups), inputs, computed_by))
        opened = open_folder(folder, tree, now=clock()) if not_owner is None else read_folder(folder, tree, now=clock())
        held_bytes = sum(file.nbytes for file in opened.content.files.values())
        return cls(
            folder,
            opened,
            budget_bytes=budget_bytes if not_owner is None else held_bytes,
            floor_bytes=floor_bytes,
            ttl_s=ttl_s,
            clock=clock,
            warnings=Warnings(warn),
            read_only="" if not_owner is None else not_owner.why,
        )

    def close(self) -> None:
        """Save what is queued, stop the writer and release the folder. A second call does nothing.

        In a forked child the writer, the index and the lock belong to the parent, and any lock of a thread may be held for
        ever: nothing of them is touched, and nothing is saved.
        """
        if self._is_closed:
            return
        self._is_closed = True
        owned = self._opened.owned
        if self._opened.is_inherited:
            if owned is not None:
                owned.lock.release()
            return
        self.reader.close()
        if not self._writer.stop():
            self._warnings.say("close", f"{self.folder}: the thread that writes does not end; what it had left is lost")
            return
        self._ledger.back_off(math.inf)
        try:
            if owned is not None:
                owned.close()
        except sqlite3.Error as error:
            self._warnings.say("close", f"{self.folder}: the log of the index stays as it is: {error}")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def now(self) -> float:
        """The time by the clock that uses are noted with."""
        return self._clock()

    def root(self, salt: str) -> bytes:
        """What stands for a salt on this disk; the salt itself is never written."""
        return self.keys.root(salt)

    def digests(self, root: bytes, tokens: bytes) -> list[bytes]:
        """Element k stands for the root and all tokens before page k; there is one more than there are whole pages."""
        return self.keys.digests(root, tokens)

    def files(self) -> list[DiskFile]:
        """All saved files; one of a prefix comes before those of what follows it."""
        with self._ledger.changed:
            saved = [file for file in self._ledger.live.values() if file.is_saved]
        self._sort(saved)
        return saved

    def _sort(self, files: list[DiskFile]) -> None:
        size = self.page_tokens
        files.sort(key=lambda file: file.address.start)  # twice by a number is quicker than once by a pair
        files.sort(key=lambda file: (file.address.end - 1) // size)

    def points(self) -> list[PointRecord]:
        """All restore points, the shallowest first."""
        with self._ledger.changed:
            return sorted(self._ledger.points.values(), key=lambda record: record.address.end)

    def put(
        self,
        address: Address,
        read: Callable[[], Buffer | None],
        nbytes: int,
        *,
        last_used: float | None = None,
        has_user: bool = True,
    ) -> DiskFile:
        """Queue a write of `nbytes` bytes of content and return at once.

        The writer calls `read` on its own thread; None means that the content is gone. Where a file of this address exists,
        it gets one user more and is returned, and nothing is written. A file that would exceed the budget has failed. Only
        the engine's thread may put a file that has a user.
        """
        used = self._clock() if last_used is None else last_used
        file = DiskFile(address, self._opened.files.size(address, nbytes), used, num_users=int(has_user))
        return self._ledger.put(address, read, file, self.budget_bytes)

    def has(self, file: DiskFile) -> bool:
        """Whether a file is live: neither dropped, lost nor cleared."""
        with self._ledger.changed:
            return self._ledger.is_live(file)

    def drop(self, file: DiskFile) -> None:
        """Count one user less. Without users a pending write is cancelled, and a saved file deleted soon."""
        self._ledger.drop(file)

    def use(self, file: DiskFile) -> None:
        """Count one user more of a file that an import has put. Only the engine's thread may."""
        self._ledger.use(file)

    def drop_unused(self, files: Iterable[DiskFile]) -> None:
        """Drop those files that nothing uses, as `drop` would. Any thread may."""
        self._ledger.drop_unused(files)

    def prioritize(self, file: DiskFile) -> None:
        """Let a pending file be written ahead of all else."""
        self._ledger.prioritize(file)

    def take(self, read: Read[DiskFile, bytearray]) -> bytearray:
        """What the reader has read, counted; raises what it has raised. A file that is not what it should be is dropped."""
        assert read.is_done
        if isinstance(read.error, DiskMiss) and not read.file.has_failed:
            self.mark_lost(read.file, read.error)
        if read.error is not None:
            raise read.error
        assert read.content is not None
        if not read.is_counted:
            read.is_counted = True
            self._count_loaded(read.file)
        return read.content

    def _read(self, file: DiskFile, keep_reading: KeepReading) -> bytearray:
        """Read a file and check everything about it, changing nothing. Any thread may read."""
        if not file.is_saved:
            raise DiskMiss(MISSING, "it was never written, or is deleted")
        content = self._opened.files.read(self.keys.name(file.address), file.address, keep_reading)
        self._require_size(file, len(content))
        return content

    def _count_loaded(self, file: DiskFile) -> None:
        self.counts.loaded += 1
        self.counts.loaded_bytes += file.nbytes

    def _require_size(self, file: DiskFile, content_bytes: int) -> None:
        if (size := self._opened.files.size(file.address, content_bytes)) != file.nbytes:
            raise DiskMiss(DAMAGED, f"its file has {size} bytes, and the index says {file.nbytes}")

    def mark_lost(self, file: DiskFile, miss: DiskMiss) -> None:
        """Drop a file that was found not to be what it should be, also if pages still use it."""
        self._ledger.mark_lost(file, miss.reason)
        if self.read_only and miss.reason == MISSING:
            return  # its owner has deleted it
        self._warnings.say(f"miss {miss.reason}", f"{self.folder}: {miss}; it is computed again")

    @contextmanager
    def open_payload(self, file: DiskFile) -> Iterator[page_files.Payload]:
        """The content of a saved file, to be read piece by piece on any thread. Raises DiskMiss, and drops nothing."""
        with self._opened.files.open_payload(self.keys.name(file.address), file.address) as payload:
            self._require_size(file, payload.nbytes)
            yield payload

    @contextmanager
    def hold(self, root: bytes) -> Iterator[Snapshot]:
        """What a root has now. Inside the context none of these files is deleted, except by `clear`.

        Those that are dropped meanwhile take space beyond the budget.
        """
        snapshot = self._ledger.hold(root)
        try:
            self._sort(snapshot.files)
            yield snapshot
        finally:
            self._ledger.release(snapshot)

    def file_bytes(self, content_bytes: int, num_tokens: int) -> int:
        """What a file with so much content and an address of so many tokens takes."""
        longest = Address(bytes(HASH_BYTES), bytes(HASH_BYTES), bytes(num_tokens * TOKEN_BYTES), 0, 0, 0)
        return self._opened.files.size(longest, content_bytes)

    def payload_bytes(self, file: DiskFile) -> int:
        """How much content a file holds: less than it takes on disk."""
        return file.nbytes - self._opened.files.size(file.address, 0)

    def put_point(
        self, address: Address, *, reason: int, is_kept: bool, is_superseded: bool, last_used: float | None = None
    ) -> None:
        """Note a restore point, or what has changed about it."""
        used = self._clock() if last_used is None else last_used
        self._put_point(PointRecord(address, reason, is_kept, is_superseded, used))

    def put_new_point(self, record: PointRecord) -> None:
        """Note a restore point, unless the index has one at this address."""
        self._put_point(record, is_known_better=True)

    def _put_point(self, record: PointRecord, *, is_known_better: bool = False) -> None:
        address = record.address
        assert address.group == POINT and address.start == address.end
        self._ledger.put_point(self.keys.name(address), record, is_known_better=is_known_better)

    def drop_point(self, address: Address) -> None:
        """Forget a restore point; one that is not known is no failure."""
        self._ledger.drop_point(self.keys.name(address))

    def touch(self, files: Iterable[DiskFile], last_used: float) -> None:
        """Note that files were used; the index has it a few seconds later."""
        self._ledger.touch(files, last_used)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that is queued is safe; False if the time is over, or a write failed since the last flush."""
        return self._writer.flush(timeout_s)

    def settle(self, root: bytes | None = None) -> bool:
        """Wait until what is queued now, or one root's part of it, is safe or has failed; False if something has."""
        return self._writer.settle(root)

    def clear(self, root: bytes | None = None) -> Callable[[], None]:
        """Forget everything, or one root's, and delete it for good soon. Files that are still referred to have failed.

        The function that is returned waits for it, on any thread: then no token of what there was remains in index or log.
        It raises DiskError if something may be left.
        """
        clearing = self._writer.clear(root)

        def wait() -> None:
            with translate_errors(self.folder):
                self._writer.wait_cleared(clearing)

        return wait

    def require_writable(self) -> None:
        """Raise ReadOnlyTree if the tree is only read."""
        if self.read_only:
            raise ReadOnlyTree("nothing was added on disk", self.folder, self.read_only)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more stay within the budget, leave the file system its floor, and are taken just now.

        The free space is what the writer measured last, about a second ago unless the file system hangs, less all that was
        written and queued since. A tree that is only read has no room, and does not measure the free space.
        """
        if self.read_only:
            return False
        ledger = self._ledger
        with ledger.changed:
            self._writer.want_measurement()
            is_within = ledger.claimed_bytes + nbytes <= self.budget_bytes
            free_bytes = ledger.soon_free_bytes
        self._note_free(free_bytes, nbytes)
        return is_within and not self._full and self.can_write

    def _note_free(self, free_bytes: int, nbytes: int) -> None:
        """Note whether the file system has its floor free after so many bytes more. If not, say it, once."""
        has_told, is_full = bool(self._full), free_bytes - nbytes < self.floor_bytes
        numbers = f"{free_bytes:,} bytes are free, and {self.floor_bytes:,} must stay free (disk_free)"
        self._full = f"the disk of {self.folder} is full: {numbers}" if is_full else ""
        if is_full and not has_told:
            self._warnings.say("write", f"{self._full}; nothing is written, and answers go on")

    @property
    def problem(self) -> str:
        """Why nothing is written now: the tree is only read, the last write failed, or the file system is full.

        "" if writes are taken.
        """
        if self.read_only:
            return f"the tree is only read: it was {self.read_only} when it was opened"
        return (self._writer.failure or "its thread has ended") if self.is_failing else self._full

    @property
    def can_write(self) -> bool:
        """Whether writes are taken; not while the disk backs off after a failure."""
        return self._writer.is_alive and not self._ledger.is_backing_off

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, and none has succeeded since."""
        return self._writer.is_failing or not self._writer.is_alive

    @property
    def counts(self) -> Counts:
        return self._ledger.counts

    @property
    def claimed_bytes(self) -> int:
        """What all live files take, saved or pending."""
        return self._ledger.claimed_bytes

    @property
    def pending_bytes(self) -> int:
        """What the files take that are not yet written."""
        return self._ledger.pending_bytes

    @property
    def used_bytes(self) -> int:
        """What the page files take on the disk right now."""
        return self._writer.used_bytes

    @property
    def index_bytes(self) -> int:
        """What the index took on the disk when it was last measured."""
        return self._writer.index_bytes

    @property
    def num_files(self) -> int:
        """How many files are live, saved or pending."""
        return len(self._ledger.live)

    def check(self) -> None:
        """Assert what always holds between calls."""
        self._ledger.check()
