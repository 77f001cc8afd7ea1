"""The ledger: which files are live, which of them are to be written, and which are to be deleted.

The engine's thread, the writer, exports and imports use it, each under `changed`. A file is live from `put` (or from the
start, if it was in the index) until it has no user, or is found to be lost.

Always true between calls (`check` asserts it):
- every pending write is of a live file, and a live file that is neither saved nor pending is being indexed just now;
- a name that is both live and deleting is of a lost file and of its replacement that is to be written;
- `claimed_bytes` is what all live files take, `pending_bytes` what the pending ones among them will take.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from bough.cache.disk.errors import REASONS
from bough.cache.disk.index import IndexChanges
from bough.cache.disk.keys import PageKeys
from bough.cache.tree.address import Address, DiskFile, PointRecord
from bough.cache.tree.state import Buffer


@dataclass
class DiskCounts:
    """Events since the disk was opened."""

    saved: int = 0
    saved_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    failed_writes: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    dropped: int = 0
    set_aside: int = 0
    orphans: int = 0
    bad_rows: int = 0  # of the index: invalid when it was opened, or impossible to store


@dataclass(eq=False, slots=True)
class Write:
    """A file to be written, and the function that packs its content."""

    file: DiskFile
    read: Callable[[], Buffer | None]
    is_urgent: bool = False
    is_taken: bool = False


@dataclass(frozen=True)
class WriteBatch:
    """One transaction, the files that are deleted after it, and what is needed to roll it back."""

    changes: IndexChanges
    saved: Sequence[DiskFile]
    removed: Sequence[DiskFile]
    cancelled: Sequence[bytes] = ()


class Ledger:
    """The live files and the queues of a disk. Any thread may call any method, except where it says otherwise."""

    def __init__(self, keys: PageKeys, files: dict[bytes, DiskFile], points: dict[bytes, PointRecord]) -> None:
        self.changed = threading.Condition()
        self.counts = DiskCounts()
        self.live = files
        self.points = points
        self.pending: dict[bytes, Write] = {}
        self.deleting: dict[bytes, DiskFile] = {}
        self._indexing: Sequence[DiskFile] = ()  # of the batch that is being committed
        self.claimed_bytes = sum(file.nbytes for file in files.values())
        self.pending_bytes = self.leaving_bytes = 0
        self._free_bytes = 0  # of the file system, as it was measured last
        self._unmeasured_bytes = 0  # of files that were written since
        self.back_off_until = self.touched_at = 0.0
        self._keys = keys
        self._queue: deque[Write] = deque()
        self._urgent: deque[Write] = deque()
        self.touched: dict[DiskFile, None] = {}
        self._changed_points: dict[bytes, PointRecord | None] = {}

    @property
    def is_backing_off(self) -> bool:
        return time.monotonic() < self.back_off_until

    @property
    def soon_free_bytes(self) -> int:
        """The free space of the file system after all that is queued is done."""
        return self._free_bytes + self.leaving_bytes - self._unmeasured_bytes - self.pending_bytes

    @property
    def has_work(self) -> bool:
        """Whether the writer has anything to do except noting uses."""
        return bool(self.pending or self.deleting or self._changed_points)

    def put(self, file: DiskFile, read: Callable[[], Buffer | None], budget_bytes: int) -> DiskFile:
        """Queue a write, unless a file of its name exists or is about to be deleted: then that is used and returned.

        A file that exceeds the budget, or comes while the disk backs off, has failed.
        """
        name = file.name
        with self.changed:
            has_room = self.claimed_bytes + file.nbytes <= budget_bytes
            known = self.live.get(name) or (self._revive(name) if has_room else None)
            if known is not None:
                if file.num_users:  # else this may not be the engine's thread, which alone changes the number
                    known.num_users += file.num_users
                known.last_used = max(known.last_used, file.last_used)
                return known
            if self.is_backing_off or not has_room:
                file.has_failed = True
                return file
            self.live[name] = file
            self.pending[name] = write = Write(file, read)
            self.claimed_bytes += file.nbytes
            self.pending_bytes += file.nbytes
            self._queue.append(write)
            self.changed.notify_all()
            return file

    def drop(self, file: DiskFile) -> None:
        """Count one user less. Without users a pending write is cancelled, and a saved file deleted soon."""
        with self.changed:
            file.num_users = max(0, file.num_users - 1)
            self.drop_unused([file])

    def drop_unused(self, files: Iterable[DiskFile]) -> None:
        with self.changed:
            if num_dropped := sum(self._forget(file) for file in files if file.num_users == 0):
                self.counts.dropped += num_dropped
                self.changed.notify_all()

    def use(self, file: DiskFile) -> None:
        """Count one user more; a file that was about to be deleted is live again. For the engine's thread."""
        with self.changed:
            if file.name not in self.live and self.deleting.get(file.name) is file:
                self._revive(file.name)
            file.num_users += 1

    def mark_lost(self, file: DiskFile, reason: str) -> None:
        """Drop a damaged or missing file, even if it has users."""
        with self.changed:
            self.counts.misses[reason] += 1
            file.is_saved, file.has_failed = False, True
            self._forget(file)
            self.changed.notify_all()

    def unsettled(self, root: bytes | None) -> list[DiskFile]:
        """The files of a root, or all, that are to be written or indexed."""
        with self.changed:
            files = [*(write.file for write in self.pending.values()), *self._indexing]
            return [file for file in files if _is_below(root, file)]

    def expire(self, before: float) -> None:
        """Drop every file and point that was last used before this time."""
        with self.changed:
            old = [file for file in self.live.values() if file.last_used < before]
            self.counts.dropped += sum(map(self._forget, old))
            for record in [each for each in self.points.values() if each.last_used < before]:
                self.drop_point(record.address)

    def put_point(self, record: PointRecord) -> None:
        """Note a restore point, or what has changed about it."""
        name = self._keys.name(record.address)
        with self.changed:
            self.points[name] = self._changed_points[name] = record
            self.changed.notify_all()

    def put_new_point(self, record: PointRecord) -> bool:
        """Note a restore point, unless there is one at this address; returns whether there was none."""
        with self.changed:
            is_new = self._keys.name(record.address) not in self.points
            if is_new:
                self.put_point(record)
            return is_new

    def drop_point(self, address: Address) -> None:
        """Forget a restore point, if it is known."""
        name = self._keys.name(address)
        with self.changed:
            if self.points.pop(name, None) is not None:
                self._changed_points[name] = None
                self.changed.notify_all()

    def touch(self, files: Iterable[DiskFile], last_used: float) -> None:
        """Note that files were used; the writer indexes it with other changes, or a few seconds later."""
        with self.changed:
            was_empty = not self.touched
            for file in files:
                file.last_used = last_used
                self.touched[file] = None
            if was_empty and self.touched:
                self.touched_at = time.monotonic()
                self.changed.notify_all()

    def is_live(self, file: DiskFile) -> bool:
        """Whether a file is neither dropped, lost nor cleared."""
        with self.changed:
            return self.live.get(file.name) is file

    def prioritize(self, file: DiskFile) -> None:
        """Write a pending file before all others."""
        with self.changed:
            write = self.pending.get(file.name)
            if write is not None and write.file is file and not write.is_urgent:
                write.is_urgent = True
                self._urgent.append(write)
                self.changed.notify_all()

    def next_write(self, *, urgent_only: bool) -> Write | None:
        """Take the next write that was not cancelled; an urgent one always comes first."""
        with self.changed:
            for queue in (self._urgent,) if urgent_only else (self._urgent, self._queue):
                while queue:
                    write = queue.popleft()
                    if self.pending.get(write.file.name) is write and not write.is_taken:  # an urgent one is in both queues
                        write.is_taken = True
                        return write
            return None

    def fail(self, writes: Iterable[Write]) -> None:
        """Give up writes that cannot be made; users of their files see `has_failed`."""
        with self.changed:
            for write in writes:
                write.file.has_failed = True
                if self.pending.get(write.file.name) is write:
                    self._forget(write.file)
            self.changed.notify_all()

    def back_off(self, seconds: float) -> None:
        """Take no writes for a while, and give up those that are queued."""
        with self.changed:
            self.back_off_until = time.monotonic() + seconds
            self.fail(list(self.pending.values()))

    def make_batch(self, written: Sequence[Write]) -> WriteBatch:
        """Decide what the next transaction does, now that the files of these writes are safe."""
        with self.changed:
            saved = [write.file for write in written if self.pending.get(write.file.name) is write]
            names = {file.name for file in saved}  # a write may have been cancelled and made again within one batch
            cancelled = [write.file.name for write in written if write.file.name not in names]
            for file in saved:
                del self.pending[file.name]
                self.pending_bytes -= file.nbytes
                self._unmeasured_bytes += file.nbytes
            removed, self.deleting = self.deleting, {}
            touched, self.touched = self.touched, {}
            points, self._changed_points = self._changed_points, {}
            self._indexing = [file for file in saved if self.live.get(file.name) is file]
            changes = IndexChanges(list(removed), self._indexing, points, list(touched))
            return WriteBatch(changes, saved, list(removed.values()), cancelled)

    def commit(self, batch: WriteBatch, rejected: Collection[bytes] = ()) -> None:
        """The transaction is safe: its files are saved. Those that the index cannot hold have failed."""
        with self.changed:
            self._indexing = ()
            self.counts.bad_rows += len(rejected)
            for name in rejected:
                if name in self.points and self.points[name] is batch.changes.points.get(name):
                    del self.points[name]
            for file in batch.changes.saved:
                if file.name in rejected:
                    self._fail_unsaved(file)
                    continue
                file.is_saved = not file.has_failed  # it may have been cleared meanwhile
                self.counts.saved += 1
                self.counts.saved_bytes += file.nbytes
            self.changed.notify_all()

    def roll_back(self, batch: WriteBatch) -> None:
        """The transaction failed: its files have failed. All else is done again, except for what was cleared since."""
        with self.changed:
            self._indexing = ()
            for file in batch.saved:
                self._fail_unsaved(file)
            written = {file.name for file in batch.saved}
            for file in batch.removed:
                if file.name not in self.live and file.name not in written:
                    self.deleting[file.name] = file
                    if file.num_users:
                        self._revive(file.name)
                else:
                    self.leaving_bytes -= file.nbytes
            points = {name: each for name, each in batch.changes.points.items() if self.points.get(name) is each}
            self._changed_points = {**points, **self._changed_points}
            self.touched = {**dict.fromkeys(batch.changes.used), **self.touched}
            self.changed.notify_all()

    def _fail_unsaved(self, file: DiskFile) -> None:
        file.has_failed = True
        if self.live.get(file.name) is file:
            del self.live[file.name]
            self.claimed_bytes -= file.nbytes

    def note_measured(self, free_bytes: int, deleted: Iterable[DiskFile] = ()) -> None:
        """Note the free space, measured after these files were deleted and all that is not pending was written."""
        with self.changed:
            self._free_bytes, self._unmeasured_bytes = free_bytes, 0
            self.leaving_bytes -= sum(file.nbytes for file in deleted)

    def clear(self, root: bytes | None) -> None:
        """Forget all files and points, or one root's; those that are pending are never written."""
        with self.changed:
            for file in [file for file in self.live.values() if _is_below(root, file)]:
                file.is_saved, file.has_failed = False, True
                self._forget(file)
                self.counts.dropped += 1
            for file in self.deleting.values():
                if _is_below(root, file):
                    file.is_saved, file.has_failed = False, True  # none of them is used again
            for name in [name for name, record in self.points.items() if _is_below(root, record)]:
                del self.points[name]
                self._changed_points.pop(name, None)
            self.touched = {file: None for file in self.touched if not _is_below(root, file)}

    def make_clearing(self, root: bytes | None) -> WriteBatch:
        """A batch in place of all rows of a root, or of all: what is to be deleted, and what was saved since `clear`.

        Points that have changed since are written again with the next batch.
        """
        with self.changed:
            removed = [file for file in self.deleting.values() if _is_below(root, file)]
            for file in removed:
                del self.deleting[file.name]
            saved = [file for file in self.live.values() if file.is_saved and _is_below(root, file)]
            points = {name: record for name, record in self.points.items() if _is_below(root, record)}
            return WriteBatch(IndexChanges(saved=saved, points=dict(points)), (), removed)

    def check(self) -> None:
        with self.changed:
            assert all(self.live.get(name) is write.file for name, write in self.pending.items())
            assert all(self.deleting[name].has_failed for name in self.live.keys() & self.deleting.keys())
            assert self.claimed_bytes == sum(file.nbytes for file in self.live.values())
            assert self.pending_bytes == sum(write.file.nbytes for write in self.pending.values())
            assert self.leaving_bytes >= sum(file.nbytes for file in self.deleting.values())

    def _forget(self, file: DiskFile) -> bool:
        """Make a file no longer live, and delete what is on disk of it; False if it was not live."""
        if self.live.get(file.name) is not file:
            return False
        del self.live[file.name]
        self.claimed_bytes -= file.nbytes
        if self.pending.pop(file.name, None) is not None:
            self.pending_bytes -= file.nbytes
        else:
            self.deleting[file.name] = file
            self.leaving_bytes += file.nbytes
        return True

    def _revive(self, name: bytes) -> DiskFile | None:
        """Make a file live again that was about to be deleted."""
        file = self.deleting.get(name)
        if file is None or file.has_failed:
            return None
        del self.deleting[name]
        self.leaving_bytes -= file.nbytes
        self.live[name] = file
        self.claimed_bytes += file.nbytes
        return file


def sort_by_depth(files: list[DiskFile], page_tokens: int) -> None:
    """Sort files so that one of a prefix comes before those of its continuations."""
    files.sort(key=lambda file: file.address.start)  # two sorts by a number are faster than one by a pair
    files.sort(key=lambda file: (file.address.end - 1) // page_tokens)


def _is_below(root: bytes | None, each: DiskFile | PointRecord) -> bool:
    return root is None or each.address.root == root
