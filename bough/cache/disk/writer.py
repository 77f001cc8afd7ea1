"""The writer: the one thread that writes to a tree's folder; and what replaces it where a tree is only read.

It writes a file at once when few are queued, and many files for each commit of the index when many are. The order is
always: temporary file, synced; renamed; folder synced; index committed; only then is a file saved. Deleting goes the other
way: index committed, then unlinked. So after a kill at any point the index has only whole files, and files that it does not
have are collected after the next start.

A failing disk never stops the thread: what could not be written has failed, writing backs off for a growing time, and
deletions are tried again. The thread also measures the free space, because asking the file system may hang.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bough.cache.disk import page_files
from bough.cache.disk.errors import ReadOnlyTree, Warnings
from bough.cache.disk.index import Index, Rejected
from bough.cache.disk.ledger import Ledger, Write, WriteBatch
from bough.cache.disk.page_files import PageFiles
from bough.cache.tree.address import DiskFile
from bough.system.threads import lower_priority

log = logging.getLogger(__name__)

BATCH_FILES = 64
BATCH_BYTES = 64 * 2**20
TOUCH_WITHIN_S = 2.0
COLLECT_AFTER_S = 1.0  # a start has better things to do
STOP_WITHIN_S = 60.0
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0
MEASURE_AFTER_S = 1.0


@dataclass(eq=False)
class Clearing:
    """A request to delete one root's files and points, or all, for good."""

    root: bytes | None
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Writer:
    """Carries out what the ledger has queued, on its own thread until `stop`.

    `used_bytes` is what the page files take now. `is_failing` is True from a failed write until one succeeds, with the
    reason in `failure`; it is logged once.
    """

    def __init__(self, ledger: Ledger, index: Index, files: PageFiles, warnings: Warnings, folder: Path) -> None:
        self._ledger, self._index, self._files = ledger, index, files
        self._warnings, self._folder = warnings, folder
        self._sizes = {name: file.nbytes for pool in (ledger.live, ledger.deleting) for name, file in pool.items()}
        self.used_bytes = sum(self._sizes.values())
        self._measured_at, self._is_measurement_wanted = 0.0, False
        self._orphans: Iterator[list[tuple[str, bytes | None]]] | None = files.names()
        self._collect_at = time.monotonic() + COLLECT_AFTER_S
        self._clearings: list[Clearing] = []
        self._num_flushing = 0
        self._num_failed = 0  # of all writes up to the last flush
        self._is_stopping = self._is_busy = False
        self.is_failing, self.failure = False, ""
        self._back_off_until, self._back_off_s = 0.0, FIRST_BACK_OFF_S
        self._thread = threading.Thread(target=self._run, name="bough disk writer", daemon=True)
        self._measure()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> bool:
        """Try all that is queued once, and end the thread; False if it does not end."""
        with self._ledger.changed:
            self._is_stopping = True
            self._ledger.changed.notify_all()
        self._thread.join(STOP_WITHIN_S)
        return not self.is_alive

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition, which is called under the lock; False if the time is over or the thread has died."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._ledger.changed:
            while not is_done():
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0 or not self.is_alive:
                    return False
                self._ledger.changed.wait(left)
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left that can be done now.

        False if something is still queued, because the time is over or the writer backs off, or if a write has failed
        since the last flush.
        """
        ledger = self._ledger
        with ledger.changed:
            self._num_flushing += 1
            ledger.changed.notify_all()
            try:
                self.wait_for(lambda: not self._is_busy and self._choose() is None, timeout_s)
            finally:
                self._num_flushing -= 1
            failed_before, self._num_failed = self._num_failed, ledger.counts.failed_writes
            return self.is_alive and self._is_idle() and failed_before == self._num_failed

    def settle(self, root: bytes | None = None) -> bool:
        """Wait until all that is queued now, or one root's part of it, is saved or has failed; False if something has."""
        files = self._ledger.unsettled(root)
        left = deque(files)

        def is_done() -> bool:
            while left and (left[0].is_saved or left[0].has_failed or not self._ledger.is_live(left[0])):
                left.popleft()
            return not left

        return self.wait_for(is_done, None) and not any(file.has_failed for file in files)

    def clear(self, root: bytes | None) -> Clearing:
        clearing = Clearing(root)
        with self._ledger.changed:
            self._ledger.clear(root)
            self._clearings.append(clearing)
            self._ledger.changed.notify_all()
        return clearing

    def wait_cleared(self, clearing: Clearing) -> None:
        """Wait until all that was to be cleared is deleted; raise OSError or sqlite3.Error if that failed."""
        if not self.wait_for(clearing.done.is_set, None):
            raise OSError("the thread that writes has ended")
        if clearing.error is not None:
            raise clearing.error

    def want_measurement(self) -> None:
        """Have the free space measured soon, if it was not within the last second; called under the lock."""
        if not self._is_measurement_wanted and time.monotonic() >= self._measured_at + MEASURE_AFTER_S:
            self._is_measurement_wanted = True
            self._ledger.changed.notify_all()

    def _is_idle(self) -> bool:
        ledger = self._ledger
        return not (self._is_busy or self._clearings or self._orphans or ledger.has_work or ledger.touched)

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._ledger.changed:
                while (task := self._choose()) is None:
                    if self._is_stopping:
                        return
                    self._ledger.changed.wait(self._wait_s())
                self._is_busy = True
            try:
                task()
            except Exception:  # our own mistake: the tree in memory goes on without what was to be written
                log.exception("the disk writer made a mistake")
                self._back_off()
                self._ledger.back_off(self._back_off_s)
            finally:
                with self._ledger.changed:
                    self._is_busy = False
                    self._ledger.changed.notify_all()

    def _choose(self) -> Callable[[], None] | None:
        ledger, now = self._ledger, time.monotonic()
        is_hurried = self._is_stopping or self._num_flushing > 0
        is_touch_due = bool(ledger.touched) and (is_hurried or now >= ledger.touched_at + TOUCH_WITHIN_S)
        if self._clearings:
            return self._clear
        if now >= self._back_off_until and (ledger.has_work or is_touch_due):
            return self._write_batch
        if self._is_stopping:
            return None
        if self._is_measurement_wanted:
            return self._measure
        is_collecting_due = self._orphans is not None and (is_hurried or now >= self._collect_at)
        return self._collect_orphans if is_collecting_due else None

    def _wait_s(self) -> float | None:
        due = [self._back_off_until] if self._ledger.has_work else []
        due += [self._collect_at] if self._orphans else []
        due += [max(self._back_off_until, self._ledger.touched_at + TOUCH_WITHIN_S)] if self._ledger.touched else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _write_batch(self) -> None:
        written, error = self._write_files()
        if written:
            try:
                self._files.sync_folders()
            except OSError as failure:
                self._give_up(written)
                written, error = [], failure
        batch = self._ledger.make_batch(written)
        self._remove(batch.cancelled)
        if self._commit(batch) and error is None and written:
            self._back_off_s = FIRST_BACK_OFF_S
            self.is_failing, self.failure = False, ""
        if error is not None:
            self._fail("a page could not be written to disk", error)

    def _write_files(self) -> tuple[list[Write], Exception | None]:
        """Write queued files until the batch is full, none is left, an urgent one has been written, or the disk fails."""
        written: list[Write] = []
        nbytes = 0
        while len(written) < BATCH_FILES and nbytes < BATCH_BYTES:
            write = self._ledger.next_write(urgent_only=any(write.is_urgent for write in written))
            if write is None:
                break
            try:
                is_written = self._write_file(write)
            except OSError as error:
                self._give_up([write])
                return written, error
            if is_written:
                written.append(write)
                nbytes += write.file.nbytes
        return written, None

    def _write_file(self, write: Write) -> bool:
        """Write one file, if its content still exists; raise OSError if the disk fails."""
        file = write.file
        try:
            content = write.read()
            payload = None if content is None else memoryview(content).cast("B")
            if payload is not None and (found := self._files.size(file.address, len(payload))) != file.nbytes:
                raise ValueError(f"a file of {file.nbytes} bytes was announced, and it would have {found}")
        except Exception as error:
            self._give_up([write])
            self._warnings.say("read", f"a page could not be read from memory to be saved: {error!r}")
            return False
        if payload is None:
            self._ledger.fail([write])
            return False
        self._note_size(file.name, self._files.write(file.name, file.address, payload))
        return True

    def _commit(self, batch: WriteBatch) -> bool:
        """Commit a batch to the index, then delete the files that it no longer has."""
        rejected: Rejected = {}
        try:
            if batch.changes:
                rejected = self._index.apply(batch.changes)
        except Exception as error:
            self._ledger.roll_back(batch)
            self._ledger.counts.failed_writes += len(batch.saved)
            self._remove(file.name for file in batch.saved)
            self._back_off()
            self._fail("the index of the tree on disk could not be written", error)
            return False
        self._ledger.commit(batch, rejected)
        if rejected:  # the rest of the batch is safe
            unsaved = [file.name for file in batch.changes.saved if file.name in rejected]
            self._ledger.counts.failed_writes += len(unsaved)
            self._remove(unsaved)
            first = next(iter(rejected.values()))
            message = f"{len(rejected)} rows can never be stored in the index and are dropped: {first}"
            self._warnings.say("rejected", message)
        kept = {file.name for file in batch.changes.saved if file.name not in rejected}
        self._remove(file.name for file in batch.removed if file.name not in kept)
        self._measure(batch.removed)
        return True

    def _measure(self, deleted: Iterable[DiskFile] = ()) -> None:
        """Measure the free space, now that these files are deleted."""
        try:
            free_bytes = page_files.free_bytes(self._folder)
        except OSError:
            free_bytes = 0
        with self._ledger.changed:
            self._ledger.note_measured(free_bytes, deleted)
            self._measured_at, self._is_measurement_wanted = time.monotonic(), False

    def _remove(self, names: Iterable[bytes]) -> None:
        """Unlink files; one that cannot be unlinked now is collected after the next start."""
        if error := self._unlink(names):
            self._warnings.say("remove", f"a page could not be deleted from disk: {error}")

    def _unlink(self, names: Iterable[bytes]) -> OSError | None:
        """Unlink as many of these files as possible; return the last failure."""
        failure = None
        for name in names:
            try:
                self._files.remove(name)
                self._note_size(name, 0)
            except OSError as error:
                failure = error
        return failure

    def _clear(self) -> None:
        """Remove all rows of what was cleared, then its files. Files that were saved since are indexed again."""
        clearing = self._clearings[0]
        batch = self._ledger.make_clearing(clearing.root)
        kept = {file.name for file in batch.changes.saved}
        try:
            self._index.clear(clearing.root)
            if batch.changes:
                self._index.apply(batch.changes)
        except Exception as error:
            self._ledger.roll_back(batch)
            clearing.error = error
        else:
            clearing.error = self._unlink(file.name for file in batch.removed if file.name not in kept)
            self._measure(batch.removed)
            while self._orphans:
                self._collect_orphans()
        finally:
            with self._ledger.changed:
                self._clearings.remove(clearing)
                clearing.done.set()
                self._ledger.changed.notify_all()

    def _collect_orphans(self) -> None:
        """Delete the files in one folder of pages that the index does not have."""
        assert self._orphans is not None
        try:
            for file, name in next(self._orphans):
                if name not in self._sizes:
                    Path(file).unlink(missing_ok=True)
                    self._ledger.counts.orphans += 1
        except StopIteration:
            self._orphans = None
        except OSError as error:
            self._warnings.say("orphans", f"files that no tree knows could not be collected: {error}")
            self._orphans = None

    def _note_size(self, name: bytes, size: int) -> None:
        self.used_bytes += size - self._sizes.pop(name, 0)
        if size:
            self._sizes[name] = size

    def _give_up(self, writes: Sequence[Write]) -> None:
        self._ledger.fail(writes)
        self._ledger.counts.failed_writes += len(writes)
        self._remove([write.file.name for write in writes if write.file.name in self._sizes])

    def _fail(self, what: str, error: Exception) -> None:
        """Note a failure and back off, longer after each in a row. Only the first is logged."""
        if not self.is_failing:
            self._warnings.say("write", f"{what}: {error}; it is tried again, and answers go on")
        self.is_failing, self.failure = True, f"{what}: {error}"
        with self._ledger.changed:
            self._ledger.counts.failed_writes += len(self._ledger.pending)
            self._ledger.back_off(self._back_off_s)
            self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)

    def _back_off(self) -> None:
        """Do not use the index for a while; deletions wait."""
        self._back_off_until = time.monotonic() + self._back_off_s


class NoWriter:
    """The writer of a tree that is only read: nothing is written, deleted, collected or re-dated.

    The ledger counts in memory as usual, but takes no new files. `why` is the reason, for the error of a clear.
    """

    is_alive = True
    is_failing = False
    failure = ""

    def __init__(self, ledger: Ledger, folder: Path, why: str) -> None:
        self._ledger, self._folder, self._why = ledger, folder, why
        ledger.back_off(math.inf)

    @property
    def used_bytes(self) -> int:
        """The bytes of the files that are still live here."""
        return self._ledger.claimed_bytes

    def stop(self) -> bool:
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        return True

    def settle(self, root: bytes | None = None) -> bool:
        return True

    def clear(self, root: bytes | None) -> Clearing:
        self._ledger.clear(root)
        return Clearing(root)

    def wait_cleared(self, clearing: Clearing) -> None:
        raise ReadOnlyTree("nothing was deleted on disk, only in memory", self._folder, self._why)

    def want_measurement(self) -> None:
        """The free space is not needed."""
