"""The reader: threads that read page files and check them, so that no other thread waits for the disk.

What a "file" is, is left open: the shared store reads its objects with a reader of its own, by their addresses.

A load has a `ReadList` with the files that it wants, in the order in which it wants them. Loads that want the same file
share one `Read`. The threads take one file from each list in turn, so that a long load does not hold up a short one. A file
that no list wants any more is not read, or given up in the middle. What has been read is held until nobody wants it; beyond
`MAX_HELD_BYTES` nothing more is read.

Always true between calls (`check` asserts it): a read is known while some list wants it, and no longer; what these hold is
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

NUM_THREADS = 2
"""One reads while the other checks; and one may hang without stopping all."""

MAX_HELD_BYTES = 256 * 2**20
"""So much content may wait to be taken: memory that no budget counts, beside what is reserved for it."""

F = TypeVar("F", bound=Hashable)
C = TypeVar("C", bound=Sized)


@dataclass(eq=False, slots=True)
class Read(Generic[F, C]):
    """The content of one file, or why there is none, once `is_done`; `num_users` lists want it.

    The error is a DiskMiss if the file is not what it should be. After any other the file may be good.
    """

    file: F
    num_users: int = 0
    is_taken: bool = False
    done_bytes: int = 0  # of the content, while it is being read
    content: C | None = None
    error: Exception | None = None
    is_counted: bool = False  # by the disk, whose counts are those of its own thread

    @property
    def is_done(self) -> bool:
        return self.content is not None or self.error is not None

    @property
    def held_bytes(self) -> int:
        return 0 if self.content is None else len(self.content)


@dataclass(frozen=True)
class ReadProgress:
    """Bytes that were read since the start, files in the middle of being read included, and the time that this took."""

    num_bytes: int = 0
    busy_s: float = 0.0


class Reader(Generic[F, C]):
    """Reads files for loads. Its threads start with the first file, and end after `close`."""

    def __init__(
        self,
        read_file: Callable[[F, KeepReading], C],
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_threads: int = NUM_THREADS,
        name: str = "disk",
    ) -> None:
        self.changed = threading.Condition()
        self._num_threads = num_threads
        self._name = name
        self._read_file = read_file
        self._clock = clock
        self._reads: dict[F, Read[F, C]] = {}
        self._lists: deque[ReadList[F, C]] = deque()  # those with something left to read, the next one first
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._held_bytes = 0
        self._num_bytes = 0
        self._busy_s = 0.0
        self._num_active = 0
        self._active_since = 0.0

    def open_list(self) -> ReadList[F, C]:
        """An empty list for one load, which closes it."""
        return ReadList(self)

    def progress(self) -> ReadProgress:
        """How much was read so far, and how long at least one thread was at it for somebody who wanted it."""
        with self.changed:
            active_s = self._clock() - self._active_since if self._num_active else 0.0
            return ReadProgress(self._num_bytes, self._busy_s + active_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until a read ends, or the time is over. Any thread may wait."""
        with self.changed:
            self.changed.wait(timeout_s)

    def close(self) -> None:
        """Give up all reads. The threads end by themselves: one that hangs in a read is not waited for."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def check(self) -> None:
        """Assert what the module's docstring says."""
        with self.changed:
            assert all(read.num_users > 0 for read in self._reads.values())
            assert self._held_bytes == sum(read.held_bytes for read in self._reads.values())

    @property
    def num_reads(self) -> int:
        """How many files are wanted now, read or not."""
        return len(self._reads)

    def want(self, read_list: ReadList[F, C], file: F) -> Read[F, C]:
        """Share the read of a file, or queue a new one. For `ReadList` only."""
        read = self._reads.setdefault(file, Read(file))
        read.num_users += 1
        if not read.is_taken and read_list not in self._lists:
            self._lists.append(read_list)
        return read

    def start(self) -> None:
        """Let the threads go on, after lists have changed. For `ReadList` only."""
        self._start_threads()
        self.changed.notify_all()

    def drop(self, read: Read[F, C]) -> None:
        """One list wants this no more. For `ReadList` only."""
        read.num_users -= 1
        if not read.num_users:
            del self._reads[read.file]
            self._held_bytes -= read.held_bytes
            if read.is_taken and not read.is_done:
                self._note_active(-1)  # a thread may hang in it for long

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
        """The next file to read, of the list whose turn it is; none while enough is held. Needs the lock."""
        while self._lists and self._held_bytes < MAX_HELD_BYTES:
            read_list = self._lists.popleft()
            read = read_list.next_untaken()
            if read is not None:
                read.is_taken = True
                self._lists.append(read_list)
                self._note_active(1)
                return read
        return None

    def carry_out(self, read: Read[F, C]) -> None:
        """Read a file that was taken, and check it. Whatever happens, the read ends, unless no list wants it any more."""
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
    """The files that one load wants. Only the engine's thread calls it."""

    def __init__(self, reader: Reader[F, C]) -> None:
        self._reader = reader
        self._reads: dict[F, Read[F, C]] = {}
        self._untaken: deque[Read[F, C]] = deque()

    def want(self, files: Sequence[F]) -> None:
        """Want these files, in this order, and no others any more."""
        wanted = dict.fromkeys(files)
        with self._reader.changed:
            for file in [file for file in self._reads if file not in wanted]:
                self._reader.drop(self._reads.pop(file))
            for file in wanted:
                if file not in self._reads:
                    self._reads[file] = self._reader.want(self, file)
            self._untaken = deque(read for read in self._reads.values() if not read.is_taken)
            self._reader.start()

    def find(self, file: F) -> Read[F, C] | None:
        """The read of a file, if it has ended."""
        read = self._reads.get(file)
        return read if read is not None and read.is_done else None

    @property
    def num_done(self) -> int:
        """How many of the files have been read, or found missing."""
        return sum(read.is_done for read in self._reads.values())

    @property
    def partial_bytes(self) -> int:
        """How much has been read of files that are not done."""
        return sum(read.done_bytes for read in self._reads.values() if not read.is_done)

    def next_untaken(self) -> Read[F, C] | None:
        """The first file that no thread has taken yet. For `Reader` only, with its lock."""
        while self._untaken and self._untaken[0].is_taken:
            self._untaken.popleft()
        return self._untaken.popleft() if self._untaken else None

    def close(self) -> None:
        """Want nothing any more."""
        self.want(())
