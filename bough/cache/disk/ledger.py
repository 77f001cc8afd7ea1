"""The ledger: which files are live, which of them wait to be written, and which wait to be deleted.

The engine's thread, the writer, and those who export and import use it, each under `changed`. A file is live from `put`
(or from the start, for those that the index knew) until it has no user, or is found to be lost. A file of a snapshot that
is held, and that is no longer live, is retired: it stays on disk, and in the index, until the hold ends. Retired files do
not count against the budget, or evictions would empty the disk in vain; so for the time of a hold the disk may take as much
more as its snapshot takes, and no more than leaves the file system its floor.

Always true between calls (`check` asserts it):
- every pending write is of a live file, and a live file that is neither saved nor pending is being indexed just now;
- a name that is both live and deleting is of a lost file and of one that is to be written in its place;
- what is retired is neither live nor deleting, and belongs to a snapshot that is held;
- `claimed_bytes` is what all live files take, `pending_bytes` what the pending ones among them will take.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from bough.cache.disk.errors import REASONS
from bough.cache.disk.index import Changes
from bough.cache.disk.keys import Keys
from bough.cache.disk.rows import PointRecord
from bough.cache.tree.address import Address, DiskFile
from bough.cache.tree.state import Buffer


@dataclass
class Counts:
    """What the store has done since it was opened."""

    saved: int = 0
    saved_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    failed_writes: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    dropped: int = 0
    set_aside: int = 0
    orphans: int = 0
    bad_rows: int = 0  # of the index, that made no sense when it was opened or could not be stored


@dataclass(eq=False, slots=True)
class Write:
    """A file to be written, and where its content comes from."""

    name: bytes
    file: DiskFile
    read: Callable[[], Buffer | None]
    is_urgent: bool = False
    is_taken: bool = False


@dataclass(frozen=True)
class Batch:
    """One batch: a transaction, the files that are deleted after it, and what is needed to roll it back."""

    changes: Changes
    saved: Sequence[Write]
    removed: dict[bytes, DiskFile]
    cancelled: Sequence[bytes]
    touched: dict[DiskFile, None]


@dataclass(eq=False)
class _Hold:
    """The files that are held: until the snapshot is made all of the root."""

    root: bytes
    files: set[DiskFile] | None = None

    def has(self, file: DiskFile) -> bool:
        return file.address.root == self.root if self.files is None else file in self.files


@dataclass(frozen=True)
class Snapshot:
    """What one root has at one moment: its saved files, and its restore points. The files are held."""

    files: list[DiskFile]
    points: list[PointRecord]
    hold: _Hold


class Ledger:
    """What is to be done, and what is there. Every method may be called by any thread."""

    def __init__(self, keys: Keys, files: dict[bytes, DiskFile], points: dict[bytes, PointRecord]) -> None:
        self.changed = threading.Condition()
        self.counts = Counts()
        self.live = files
        self.points = points
        self.pending: dict[bytes, Write] = {}
        self.deleting: dict[bytes, DiskFile] = {}
        self.retired: dict[bytes, DiskFile] = {}
        self._holds: list[_Hold] = []
        self._indexing: Sequence[DiskFile] = ()  # of the batch that is being committed
        self.claimed_bytes = sum(file.nbytes for file in files.values())
        self.pending_bytes = 0
        self.leaving_bytes = 0
        self._free_bytes = 0  # of the file system, as it was measured last
        self._unmeasured_bytes = 0  # of files that were written since
        self.back_off_until = 0.0
        self.touched_at = 0.0
        self._keys = keys
        self._queue: deque[Write] = deque()
        self._urgent: deque[Write] = deque()
        self._touched: dict[DiskFile, None] = {}
        self._changed_points: dict[bytes, PointRecord | None] = {}

    @property
    def is_backing_off(self) -> bool:
        """Whether no writes are taken, after a failure."""
        return time.monotonic() < self.back_off_until

    @property
    def soon_free_bytes(self) -> int:
        """What the file system has for users when all that is queued is done."""
        return self._free_bytes + self.leaving_bytes - self._unmeasured_bytes - self.pending_bytes

    @property
    def has_work(self) -> bool:
        """Whether anything but recency waits for the writer."""
        return bool(self.pending or self.deleting or self._changed_points)

    @property
    def has_touched(self) -> bool:
        return bool(self._touched)

    def put(self, address: Address, read: Callable[[], Buffer | None], file: DiskFile, budget_bytes: int) -> DiskFile:
        """Queue a write. A file of the same address that exists is used instead, also one that was about to be deleted.

        A file that has no room, or comes while no writes are taken, has failed.
        """
        name = self._keys.name(address)
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
            write = Write(name, file, read)
            self.live[name] = file
            self.pending[name] = write
            self.claimed_bytes += file.nbytes
            self.pending_bytes += file.nbytes
            self._queue.append(write)
            self.changed.notify_all()
            return file

    def drop(self, file: DiskFile) -> None:
        """Count one user less; without users the file is no longer live."""
        with self.changed:
            file.num_users = max(0, file.num_users - 1)
            if file.num_users == 0 and self._forget(file):
                self.counts.dropped += 1
                self.changed.notify_all()

    def use(self, file: DiskFile) -> None:
        """Count one user more; a file that was about to be deleted is live again."""
        with self.changed:
            name = self._keys.name(file.address)
            if name not in self.live and file in (self.retired.get(name), self.deleting.get(name)):
                self._revive(name)
            file.num_users += 1

    def drop_unused(self, files: Iterable[DiskFile]) -> None:
        """Drop those files that nothing uses."""
        with self.changed:
            for file in files:
                if file.num_users == 0 and self._forget(file):
                    self.counts.dropped += 1
            self.changed.notify_all()

    def mark_lost(self, file: DiskFile, reason: str) -> None:
        """Drop a file that is not what it should be, whatever uses it."""
        with self.changed:
            self.counts.misses[reason] += 1
            file.is_saved, file.has_failed = False, True
            self._forget(file)
            self._delete_retired(lambda retired: retired is file)
            self.changed.notify_all()

    def hold(self, root: bytes) -> Snapshot:
        """What a root has now; none of these files is deleted before `release`, except by `clear`."""
        hold = _Hold(root)
        with self.changed:
            self._holds.append(hold)
            files, points = list(self.live.values()), list(self.points.values())
        files = [file for file in files if file.is_saved and file.address.root == root]  # takes a while
        held = set(files)
        with self.changed:
            hold.files = held
            self._delete_unheld()
        return Snapshot(files, [record for record in points if record.address.root == root], hold)

    def release(self, snapshot: Snapshot) -> None:
        """End a hold; what was retired meanwhile is deleted, unless another snapshot has it too."""
        with self.changed:
            self._holds.remove(snapshot.hold)
            self._delete_unheld()

    def unsettled(self, root: bytes | None) -> list[DiskFile]:
        """The files of a root, or all, that are to be written or indexed."""
        with self.changed:
            files = [*(write.file for write in self.pending.values()), *self._indexing]
            return [file for file in files if root in (None, file.address.root)]

    def expire(self, before: float) -> None:
        """Drop every file and point that was last used before this time."""
        with self.changed:
            for file in [file for file in self.live.values() if file.last_used < before]:
                self._forget(file)
                self.counts.dropped += 1
            for name in [name for name, record in self.points.items() if record.last_used < before]:
                self.drop_point(name)

    def put_point(self, name: bytes, record: PointRecord, *, is_known_better: bool = False) -> None:
        """Note a restore point; with `is_known_better`, only if there is none of this name."""
        with self.changed:
            if is_known_better and name in self.points:
                return
            self.points[name] = self._changed_points[name] = record
            self.changed.notify_all()

    def drop_point(self, name: bytes) -> None:
        with self.changed:
            if self.points.pop(name, None) is not None:
                self._changed_points[name] = None
                self.changed.notify_all()

    def touch(self, files: Iterable[DiskFile], last_used: float) -> None:
        """Note that files were used; the writer writes it down with other changes, or a little later."""
        with self.changed:
            was_empty = not self._touched
            for file in files:
                file.last_used = last_used
                self._touched[file] = None
            if was_empty and self._touched:
                self.touched_at = time.monotonic()
                self.changed.notify_all()

    def is_live(self, file: DiskFile) -> bool:
        return self.live.get(self._keys.name(file.address)) is file

    def find_write(self, file: DiskFile) -> Write | None:
        """The pending write of a file, if there is one."""
        with self.changed:
            write = self.pending.get(self._keys.name(file.address))
            return write if write is not None and write.file is file else None

    def prioritize(self, file: DiskFile) -> None:
        """Write a pending file before all others."""
        with self.changed:
            if (write := self.find_write(file)) is not None and not write.is_urgent:
                write.is_urgent = True
                self._urgent.append(write)
                self.changed.notify_all()

    def next_write(self, *, urgent_only: bool) -> Write | None:
        """Take the next write that was not cancelled; an urgent one always comes first."""
        with self.changed:
            for queue in (self._urgent,) if urgent_only else (self._urgent, self._queue):
                while queue:
                    write = queue.popleft()
                    if self.pending.get(write.name) is write and not write.is_taken:  # an urgent one stands in both queues
                        write.is_taken = True
                        return write
            return None

    def fail(self, writes: Iterable[Write]) -> None:
        """Give up writes that cannot be made; users of their files see `has_failed`."""
        with self.changed:
            for write in writes:
                write.file.has_failed = True
                if self.pending.get(write.name) is write:
                    self._forget(write.file)
            self.changed.notify_all()

    def back_off(self, seconds: float) -> None:
        """Take no writes for so long, and give up those that wait."""
        with self.changed:
            self.back_off_until = time.monotonic() + seconds
            self.fail(list(self.pending.values()))

    def make_batch(self, written: Sequence[Write]) -> Batch:
        """Decide what the next transaction does, now that the files of these writes are safe."""
        with self.changed:
            saved = [write for write in written if self.pending.get(write.name) is write]
            names = {write.name for write in saved}  # a write may have been cancelled and made again within one batch
            cancelled = [write.name for write in written if write.name not in names]
            for write in saved:
                del self.pending[write.name]
                self.pending_bytes -= write.file.nbytes
                self._unmeasured_bytes += write.file.nbytes
            removed, self.deleting = self.deleting, {}
            touched, self._touched = self._touched, {}
            points, self._changed_points = self._changed_points, {}
            saved_rows = [(write.name, write.file) for write in saved if self.live.get(write.name) is write.file]
            self._indexing = [file for _, file in saved_rows]
            used = [(self._keys.name(file.address), file.last_used) for file in touched]
            changes = Changes(list(removed), saved_rows, points, used)
            return Batch(changes, saved, removed, cancelled, touched)

    def commit(self, batch: Batch, rejected: Collection[bytes] = ()) -> None:
        """The transaction is safe: its files are saved, but for those that the index cannot hold, which have failed."""
        with self.changed:
            self._indexing = ()
            self.counts.bad_rows += len(rejected)
            for name in rejected:
                if name in self.points and self.points[name] is batch.changes.points.get(name):
                    del self.points[name]
            for name, file in batch.changes.saved:
                if name in rejected:
                    self._reject(name, file)
                    continue
                file.is_saved = not file.has_failed  # it may have been cleared meanwhile
                self.counts.saved += 1
                self.counts.saved_bytes += file.nbytes
            self.changed.notify_all()

    def _reject(self, name: bytes, file: DiskFile) -> None:
        file.has_failed = True
        if self.live.get(name) is file:
            del self.live[name]
            self.claimed_bytes -= file.nbytes

    def note_measured(self, free_bytes: int, deleted: Iterable[DiskFile] = ()) -> None:
        """The writer has measured the free space, after it had deleted these files and written all that is not pending."""
        with self.changed:
            self._free_bytes, self._unmeasured_bytes = free_bytes, 0
            self.leaving_bytes -= sum(file.nbytes for file in deleted)

    def roll_back(self, batch: Batch) -> None:
        """The transaction failed: its files have failed. All else is to be done again, but for what was cleared since."""
        with self.changed:
            self._indexing = ()
            for write in batch.saved:
                write.file.has_failed = True
                if self.live.get(write.name) is write.file:
                    del self.live[write.name]
                    self.claimed_bytes -= write.file.nbytes
            written = {write.name for write in batch.saved}
            for name, file in batch.removed.items():
                if name not in self.live and name not in written:
                    self.deleting[name] = file
                    if file.num_users:
                        self._revive(name)
                else:
                    self.leaving_bytes -= file.nbytes
            points = {name: each for name, each in batch.changes.points.items() if self.points.get(name) is each}
            self._changed_points = {**points, **self._changed_points}
            self._touched = {**batch.touched, **self._touched}
            self.changed.notify_all()

    def clear(self, root: bytes | None) -> None:
        """Forget all files and points, or one root's; what is pending among them is never written."""
        with self.changed:
            for file in [file for file in self.live.values() if root in (None, file.address.root)]:
                file.is_saved, file.has_failed = False, True
                self._forget(file)
                self.counts.dropped += 1
            self._delete_retired(lambda file: root in (None, file.address.root))
            for file in self.deleting.values():
                if root in (None, file.address.root):
                    file.is_saved, file.has_failed = False, True  # none of them is used again
            for name in [name for name, record in self.points.items() if root in (None, record.address.root)]:
                del self.points[name]
                self._changed_points.pop(name, None)
            self._touched = {file: None for file in self._touched if root not in (None, file.address.root)}

    def make_clearing(self, root: bytes | None) -> Batch:
        """A batch in place of all rows of a root, or of all: what is to be deleted, and what was saved since `clear`."""
        with self.changed:
            removed = {name: file for name, file in self.deleting.items() if root in (None, file.address.root)}
            for name in removed:
                del self.deleting[name]
            saved = [
                (name, file) for name, file in self.live.items() if file.is_saved and root in (None, file.address.root)
            ]
            points = {
                name: record for name, record in self.points.items() if root in (None, record.address.root)
            }  # those that have changed are written once more with the next batch
            return Batch(Changes([], saved, dict(points), []), (), removed, (), {})

    def check(self) -> None:
        """Assert what the module promises."""
        with self.changed:
            assert all(self.live.get(name) is write.file for name, write in self.pending.items())
            assert all(self.deleting[name].has_failed for name in self.live.keys() & self.deleting.keys())
            assert self.claimed_bytes == sum(file.nbytes for file in self.live.values())
            assert self.pending_bytes == sum(write.file.nbytes for write in self.pending.values())
            assert not self.retired.keys() & (self.live.keys() | self.deleting.keys())
            assert all(self._is_held(file) for file in self.retired.values())
            assert self.leaving_bytes >= sum(file.nbytes for file in self.deleting.values())

    def _forget(self, file: DiskFile) -> bool:
        """Make a file no longer live; False if it was not. What is on the disk of it is to be deleted."""
        name = self._keys.name(file.address)
        if self.live.get(name) is not file:
            return False
        del self.live[name]
        self.claimed_bytes -= file.nbytes
        if self.pending.pop(name, None) is not None:
            self.pending_bytes -= file.nbytes
        elif file.is_saved and self._is_held(file):
            self.retired[name] = file
        else:
            self._delete(name, file)
        return True

    def _delete(self, name: bytes, file: DiskFile) -> None:
        self.deleting[name] = file
        self.leaving_bytes += file.nbytes

    def _is_held(self, file: DiskFile) -> bool:
        return any(hold.has(file) for hold in self._holds)

    def _delete_unheld(self) -> None:
        self._delete_retired(lambda file: not self._is_held(file))
        self.changed.notify_all()

    def _delete_retired(self, is_meant: Callable[[DiskFile], bool]) -> None:
        for name, file in [(name, file) for name, file in self.retired.items() if is_meant(file)]:
            del self.retired[name]
            self._delete(name, file)

    def _revive(self, name: bytes) -> DiskFile | None:
        """A file that was about to be deleted, or is only held, is live again."""
        file = self.retired.pop(name, None)
        if file is None:
            file = self.deleting.get(name)
            if file is None or file.has_failed:
                return None
            del self.deleting[name]
            self.leaving_bytes -= file.nbytes
        self.live[name] = file
        self.claimed_bytes += file.nbytes
        return file
