"""The disk tier: pages and states of one model in files, found again after a restart.

A `Disk` owns one folder, or only reads one that it cannot own. The writer's thread does all the writing, the threads of
the `reader` read what is to be loaded. Any thread may put, look and wait. Only the engine's thread makes a saved file
useless (`take`, `mark_lost`, `clear`), because it decides by what is saved. A failing disk raises only at the start, from
waiting for a clear, and as DiskMiss from `take` and `read`. Only `read`, `flush`, `settle` and `close` wait for the disk,
and the engine's thread calls none of them while requests run.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from bough.cache.disk.errors import MISSING, DiskMiss, NotOwner, ReadOnlyTree, Warnings
from bough.cache.disk.folder import open_folder, read_folder, translate_errors
from bough.cache.disk.index import Identity, Notes
from bough.cache.disk.index_rows import encode_groups
from bough.cache.disk.keys import HASH_BYTES
from bough.cache.disk.ledger import Ledger, sort_by_depth
from bough.cache.disk.page_files import KeepReading, always
from bough.cache.disk.reader import DiskReader, Read
from bough.cache.disk.writer import NoWriter, Writer
from bough.cache.tree.address import Address, DiskFile, PointRecord
from bough.cache.tree.state import Buffer, Group
from bough.tokens import TOKEN_BYTES

log = logging.getLogger(__name__)


class Disk:
    """The files of one (model, fingerprint), until `close`. `read_only` is the reason if they are only read."""

    def __init__(
        self,
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
    ) -> None:
        """Take a folder and read its index. Raise NotOwner if it cannot be taken, DiskError if the system fails.

        Content that is damaged, or of another fingerprint, format or page size, is moved to a folder beside it. With
        `not_owner`, the error of an earlier attempt, the folder is read as it is now and never changed; a file that its
        owner deletes later is a miss, and the budget is what there is. `model`, `groups`, `inputs` and `computed_by` are
        noted in the index.
        """
        self.now = clock  # uses are noted with this time
        identity = Identity(fingerprint, page_tokens, Notes(model, encode_groups(groups), inputs, computed_by))
        take_folder = open_folder if not_owner is None else read_folder
        opened = take_folder(folder, identity, now=clock())
        self.folder, self.page_tokens = folder, page_tokens
        self.identity, self.keys = identity, opened.keys
        self.read_only = "" if not_owner is None else not_owner.why
        self.is_closed = False
        self._opened, self._pid = opened, os.getpid()
        self._warnings = Warnings(warn)
        self._ledger = ledger = Ledger(opened.keys, opened.content.files, opened.content.points)
        self.counts = ledger.counts
        self.budget_bytes = budget_bytes if not_owner is None else ledger.claimed_bytes
        self.floor_bytes = floor_bytes
        self._full = ""  # why the file system takes no more, if it does not
        if opened.set_aside:
            self.counts.set_aside += 1
            self._warnings.say("set aside", opened.set_aside)
        if bad_rows := opened.content.bad_rows:
            self.counts.bad_rows += len(bad_rows)
            problem = f"{len(bad_rows)} rows of the index make no sense and are dropped; {bad_rows[0]}"
            self._warnings.say("rows", f"{folder}: {problem}")
        if ttl_s is not None:
            ledger.expire(clock() - ttl_s)
        if opened.owned is None:
            self._writer: Writer | NoWriter = NoWriter(ledger, folder, self.read_only)
        else:
            self._writer = Writer(ledger, opened.owned.index, opened.files, self._warnings, folder)
        self.reader: DiskReader[DiskFile, bytearray] = DiskReader(self.read)
        # The rest of the interface is that of the parts.
        self.root, self.digests = opened.keys.root, opened.keys.digests
        self.has, self.use, self.drop, self.drop_unused = ledger.is_live, ledger.use, ledger.drop, ledger.drop_unused
        self.prioritize, self.touch = ledger.prioritize, ledger.touch
        self.put_point, self.put_new_point, self.drop_point = ledger.put_point, ledger.put_new_point, ledger.drop_point
        self.flush, self.settle = self._writer.flush, self._writer.settle

    def close(self) -> None:
        """Save what is queued, stop the writer and release the folder. A second call does nothing.

        In a forked child the writer, the index and the lock belong to the parent, and a thread's lock may be held for ever:
        they are not touched, and nothing is saved.
        """
        if self.is_closed:
            return
        self.is_closed = True
        owned = self._opened.owned
        if self._pid != os.getpid():
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

    def files(self) -> list[DiskFile]:
        """All saved files; one of a prefix comes before those of its continuations."""
        with self._ledger.changed:
            saved = [file for file in self._ledger.live.values() if file.is_saved]
        sort_by_depth(saved, self.page_tokens)
        return saved

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

        The writer calls `read` on its own thread; None means that the content is gone. If a file of this address exists,
        it gets one user more and is returned, and nothing is written. A file that would exceed the budget has failed. Only
        the engine's thread may put a file that has a user.
        """
        used = self.now() if last_used is None else last_used
        nbytes = self._opened.files.size(address, nbytes)
        file = DiskFile(self.keys.name(address), address, nbytes, used, num_users=int(has_user))
        return self._ledger.put(file, read, self.budget_bytes)

    def take(self, read: Read[DiskFile, bytearray]) -> bytearray:
        """The content of a read that has ended, counted; raise its error. A damaged or missing file is dropped."""
        assert read.is_done
        if isinstance(read.error, DiskMiss) and not read.file.has_failed:
            self.mark_lost(read.file, read.error)
        if read.error is not None:
            raise read.error
        assert read.content is not None
        if not read.is_counted:
            read.is_counted = True
            self.counts.loaded += 1
            self.counts.loaded_bytes += read.file.nbytes
        return read.content

    def read(self, file: DiskFile, keep_reading: KeepReading = always) -> bytearray:
        """Read and verify a saved file, changing nothing. Any thread may read. Raise DiskMiss, and drop nothing."""
        if not file.is_saved:
            raise DiskMiss(MISSING, "it was never written, or is deleted")
        return self._opened.files.read(file, keep_reading)

    def mark_lost(self, file: DiskFile, miss: DiskMiss) -> None:
        """Drop a damaged or missing file, even if pages still use it."""
        self._ledger.mark_lost(file, miss.reason)
        if not (self.read_only and miss.reason == MISSING):  # else its owner has deleted it
            self._warnings.say(f"miss {miss.reason}", f"{self.folder}: {miss}; it is computed again")

    def file_bytes(self, content_bytes: int, num_tokens: int) -> int:
        """The size of a file with this much content and an address of this many tokens."""
        longest = Address(bytes(HASH_BYTES), bytes(HASH_BYTES), bytes(num_tokens * TOKEN_BYTES), 0, 0, 0)
        return self._opened.files.size(longest, content_bytes)

    def payload_bytes(self, file: DiskFile) -> int:
        return file.nbytes - self._opened.files.size(file.address, 0)

    def clear(self, root: bytes | None = None) -> Callable[[], None]:
        """Forget everything, or one root's, and delete it for good soon. Files that still have users have failed.

        The returned function waits for it, on any thread: then no token of it remains in index or log. It raises DiskError
        if something may be left.
        """
        clearing = self._writer.clear(root)

        def wait() -> None:
            with translate_errors(self.folder):
                self._writer.wait_cleared(clearing)

        return wait

    def require_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyTree("nothing was added on disk", self.folder, self.read_only)

    def has_room(self, nbytes: int) -> bool:
        """Whether this many bytes more fit into the budget, leave the file system its floor, and are taken just now.

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
        was_full, is_full = bool(self._full), free_bytes - nbytes < self.floor_bytes
        numbers = f"{free_bytes:,} bytes are free, and {self.floor_bytes:,} must stay free (disk_free)"
        self._full = f"the disk of {self.folder} is full: {numbers}" if is_full else ""
        if is_full and not was_full:
            self._warnings.say("write", f"{self._full}; nothing is written, and answers go on")
        return is_within and not is_full and self.can_write

    @property
    def problem(self) -> str:
        """Why nothing is written now: the tree is only read, the last write failed, or the file system is full; else ""."""
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
    def claimed_bytes(self) -> int:
        """The bytes of all live files, saved or pending."""
        return self._ledger.claimed_bytes

    @property
    def pending_bytes(self) -> int:
        return self._ledger.pending_bytes

    @property
    def used_bytes(self) -> int:
        return self._writer.used_bytes

    @property
    def num_files(self) -> int:
        """How many files are live, saved or pending."""
        return len(self._ledger.live)

    def check(self) -> None:
        self._ledger.check()
