"""The reader: threads that read and verify page files, so that no other thread waits for the disk.

A "file" is any key: the shared store reads its objects, by address, with a reader of its own.

A load has a `ReadList` with the files that it wants, in order. Loads that want the same file share one `Read`. The threads
take one file from each list in turn, so that a long load does not delay a short one. A file that no list wants any more is
not read, or given up in the middle. Content is held until no list wants it; beyond `MAX_HELD_BYTES` nothing more is read.

Always true between calls (`check` asserts it): a read is known exactly as long as some list wants it, and its bytes are
counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from bough.cache.disk.errors import DiskMiss, DiskSlow
from bough.cache.disk.page_files import KeepReading
from bough.errors import EngineError

log = logging.getLogger(__name__)

NUM_THREADS = 2  # one reads while the other verifies, and one may hang without stopping all
MAX_HELD_BYTES = 256 * 2**20  # of content that waits to be taken; no budget counts it

F = TypeVar("F", bound=Hashable)
C = TypeVar("C", bound=Sized)


@dataclass(eq=False, slots=True)
class Read(Generic[F, C]):
    """The content of one file, or an error, once `is_done`; `num_users` lists want it.

    The error is a DiskMiss if the file is damaged or missing. After any other the file may be good.
    """

    file: F
    num_users: int = 0
    is_taken: bool = False
    done_bytes: int = 0  # of the content, while it is being read
    content: C | None = None
    error: Exception | None = None
    is_counted: bool = False  # by the disk, on the thread that takes it

    @property
    def is_done(self) -> bool:
        return self.content is not None or self.error is not None

    @property
    def held_bytes(self) -> int:
        return 0 if self.content is None else len(self.content)


@dataclass(frozen=True)
class ReadProgress:
    """Bytes read since the start, including parts of files, and the time that this took."""

    num_bytes: int = 0
    busy_s: float = 0.0


class DiskReader(Generic[F, C]):
    """Reads files for loads, on threads that start with the first file and end after `close`."""

    def __init__(
        self,
        read_file: Callable[[F, KeepReading], C],
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_threads: int = NUM_THREADS,
        name: str = "disk",
    ) -> None:
        self.changed = threading.Condition()
        self._read_file, self._clock = read_file, clock
        self._num_threads, self._name = num_threads, name
        self._reads: dict[F, Read[F, C]] = {}
        self._lists: deque[ReadList[F, C]] = deque()  # those with something left to read, the next one first
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._held_bytes = self._num_bytes = self._num_active = 0
        self._busy_s = self._active_since = 0.0

    def open_list(self) -> ReadList[F, C]:
        """An empty list for one load, which closes it."""
        return ReadList(self)

    def progress(self) -> ReadProgress:
        """The bytes read so far, and how long at least one thread was reading a file that was still wanted."""
        with self.changed:
            active_s = self._clock() - self._active_since if self._num_active else 0.0
            return ReadProgress(self._num_bytes, self._busy_s + active_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until a read ends, or the time is over. Any thread may wait."""
        with self.changed:
            self.changed.wait(timeout_s)

    def close(self) -> None:
        """Give up all reads, without waiting for the threads to end: one may hang in a read."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def check(self) -> None:
        with self.changed:
            assert all(read.num_users > 0 for read in self._reads.values())
            assert self._held_bytes == sum(read.held_bytes for read in self._reads.values())

    @property
    def num_reads(self) -> int:
        """How many files are wanted, read or not."""
        return len(self._reads)

    def want(self, read_list: ReadList[F, C], files: Sequence[F]) -> None:
        """Make a list want these files, in this order, and no others."""
        wanted, reads = dict.fromkeys(files), read_list.reads
        with self.changed:
            for file in [file for file in reads if file not in wanted]:
                self._drop(reads.pop(file))
            for file in wanted:
                if file not in reads:
                    reads[file] = read = self._reads.setdefault(file, Read(file))
                    read.num_users += 1
            read_list.untaken = deque(read for read in reads.values() if not read.is_taken)
            if read_list.untaken and read_list not in self._lists:
                self._lists.append(read_list)
            self._start_threads()
            self.changed.notify_all()

    def _drop(self, read: Read[F, C]) -> None:
        read.num_users -= 1
        if not read.num_users:
            del self._reads[read.file]
            self._held_bytes -= read.held_bytes
            if read.is_taken and not read.is_done:
                self._note_active(-1)  # its thread may hang for long

    def _start_threads(self) -> None:
        while self._lists and len(self._threads) < self._num_threads and not self._is_closed:
            thread = threading.Thread(target=self._run, name=f"bough {self._name} reader", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many threads
                log.warning("the %s is read by %d threads only: %s", self._name, len(self._threads), error)
                break
            self._threads.append(thread)
        if not self._threads:
            while (read := self.take_next()) is not None:
                self._end(read, None, EngineError(f"no thread could be started to read from the {self._name}"))

    def _run(self) -> None:
        while True:
            with self.changed:
                while (read := self.take_next()) is None and not self._is_closed:
                    self.changed.wait()
                if read is None or self._is_closed:
                    return
            self.carry_out(read)

    def take_next(self) -> Read[F, C] | None:
        """Take the next file, from the list whose turn it is; none while enough is held. Called under the lock."""
        while self._lists and self._held_bytes < MAX_HELD_BYTES:
            read_list = self._lists.popleft()
            while read_list.untaken:
                read = read_list.untaken.popleft()
                if not read.is_taken:  # else another list has had its turn with this file
                    read.is_taken = True
                    self._lists.append(read_list)
                    self._note_active(1)
                    return read
        return None

    def carry_out(self, read: Read[F, C]) -> None:
        """Read a file that was taken. Whatever happens, the read ends, unless no list wants it any more."""
        content: C | None = None
        failure: Exception | None = None
        try:
            content = self._read_file(read.file, self._watch(read))
        except DiskSlow:
            pass  # it was given up
        except (DiskMiss, MemoryError) as error:
            failure = error
        except Exception as error:
            log.exception("the %s reader made a mistake", self._name)
            failure = EngineError(f"reading a page failed by a mistake of ours: {error!r}")
        with self.changed:
            self._end(read, content, failure)

    def _end(self, read: Read[F, C], content: C | None, failure: Exception | None) -> None:
        if read.num_users:
            self._note_active(-1)
            read.content, read.error = content, failure
            self._held_bytes += read.held_bytes
        self.changed.notify_all()

    def _watch(self, read: Read[F, C]) -> KeepReading:
        seen = 0

        def keep_reading(done_bytes: int) -> bool:
            nonlocal seen
            with self.changed:
                self._num_bytes += done_bytes - seen
            seen = read.done_bytes = done_bytes
            return read.num_users > 0 and not self._is_closed

        return keep_reading

    def _note_active(self, change: int) -> None:
        now = self._clock()
        if self._num_active:
            self._busy_s += now - self._active_since
        self._active_since = now
        self._num_active += change


class ReadList(Generic[F, C]):
    """The files that one load wants, for the engine's thread; those that no thread has taken yet are the reader's."""

    def __init__(self, reader: DiskReader[F, C]) -> None:
        self.reads: dict[F, Read[F, C]] = {}
        self.untaken: deque[Read[F, C]] = deque()
        self._reader = reader

    def want(self, files: Sequence[F]) -> None:
        """Want these files, in this order, and no others."""
        self._reader.want(self, files)

    def close(self) -> None:
        self._reader.want(self, ())

    def find(self, file: F) -> Read[F, C] | None:
        read = self.reads.get(file)
        return read if read is not None and read.is_done else None

    @property
    def num_done(self) -> int:
        """How many of the files have been read, or have failed."""
        return sum(read.is_done for read in self.reads.values())

    @property
    def partial_bytes(self) -> int:
        """The bytes read of files that are not done."""
        return sum(read.done_bytes for read in self.reads.values() if not read.is_done)
