"""The shared store of one model: what is read from it and sent to it, and whether it answers.

Some threads read, another one sends; the engine's thread never waits for them. Every failure is a miss: an object that is
missing, damaged, of another prefix or of another secret is computed, and after a failure the store is not used for a while.
An object that was not found is not requested again for a short while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bough.cache.disk.errors import DAMAGED, FOREIGN, MISSING, UNREADABLE, DiskMiss, DiskSlow
from bough.cache.disk.keys import PageKeys
from bough.cache.disk.page_files import KeepReading
from bough.cache.disk.reader import DiskReader
from bough.cache.store.format import MAX_OBJECT_BYTES, POINTS, Object, StorePath, decode, read_points
from bough.cache.store.objects import Health, NotPlain, ObjectStore, StoreCounts, StoredObject, StoreError
from bough.cache.store.uploader import Uploader
from bough.cache.tree.address import Address

log = logging.getLogger(__name__)

NUM_READERS = 8
MISSING_S = 10.0  # an object that was not found is not requested again this soon
MAX_MISSING = 100_000
SILENT_S = 1.0  # nothing is requested for this long after a store has not answered in time


class SharedStore:
    """The objects of one fingerprint, named under the secret of the cluster, until `close`."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        secret: bytes,
        fingerprint: str,
        page_tokens: int,
        owner: str,
        budget_bytes: int | None = None,
        ttl_s: float | None = None,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.keys = PageKeys(secret, fingerprint, page_tokens)
        self.counts = StoreCounts()
        self.health = Health(self.counts, clock, warn)  # of reading
        self.sending = Health(self.counts, clock, warn)  # a store that is full can still be read
        self.budget_bytes = budget_bytes
        self.reader = self._make_reader()
        self.uploader = Uploader(objects, self.keys, owner, self.sending, self.counts, budget_bytes, ttl_s, clock, wall)
        self._objects, self._max_object_bytes, self._clock = objects, max_object_bytes, clock
        self._lock = threading.Lock()
        self._missing: dict[bytes, float] = {}  # names, until when
        self._silent_until = float("-inf")
        self._is_closed = False
        self._start()

    def _make_reader(self) -> DiskReader[Address, Object]:
        return DiskReader(self.read, num_threads=NUM_READERS, name="store")

    def _start(self) -> None:
        self.uploader.start()

    def path(self, salt: str) -> StorePath:
        """A new path below a salt."""
        return StorePath(self.keys, salt)

    @property
    def is_available(self) -> bool:
        """Whether objects may be requested now."""
        return not self._is_closed and not self.health.is_backing_off and self._clock() >= self._silent_until

    def note_silence(self) -> None:
        """A request has waited in vain for an answer: for a moment, no other waits."""
        self._silent_until = self._clock() + SILENT_S

    def is_missing(self, address: Address) -> bool:
        """Whether an object was not found a moment ago."""
        with self._lock:
            until = self._missing.get(self.keys.name(address))
        return until is not None and self._clock() < until

    def forget_missing(self, path: StorePath) -> None:
        """Another machine has just sent the objects of a path: they may be requested again."""
        with self._lock:
            for page in range(path.num_pages):
                for address in (path.rows(page), path.points(page)):
                    self._missing.pop(self.keys.name(address), None)

    def read(self, address: Address, keep_reading: KeepReading) -> Object:
        """Get and verify an object, on a thread of the reader; raise DiskMiss."""
        if self._is_closed or self.health.is_backing_off:
            raise DiskMiss(UNREADABLE, "the store is left alone for a while")
        try:
            stored = self._objects.get(self.uploader.key(address), self._max_object_bytes)
        except NotPlain as error:
            miss = DiskMiss(FOREIGN, str(error))
            self._note_miss(address, miss)
            raise miss from None
        except StoreError as error:
            self.health.fail("it could not be read", error)
            raise DiskMiss(UNREADABLE, str(error)) from None
        self.health.succeed()
        try:
            if stored is None:
                raise DiskMiss(MISSING)
            found = self._decode(address, stored)
        except DiskMiss as miss:
            self._note_miss(address, miss)
            raise
        if not keep_reading(found.nbytes):
            raise DiskSlow(found.nbytes)
        return found

    def _decode(self, address: Address, stored: StoredObject) -> Object:
        if stored.nbytes > self._max_object_bytes:
            raise DiskMiss(DAMAGED, f"it has {stored.nbytes:,} bytes, and at most {self._max_object_bytes:,} are read")
        found = decode(self.keys, address, stored.content)
        points = read_points(address, found) if address.group == POINTS else []
        self.uploader.note_seen(address, points)
        return found

    def _note_miss(self, address: Address, miss: DiskMiss) -> None:
        with self._lock:
            self._missing[self.keys.name(address)] = self._clock() + MISSING_S
            while len(self._missing) > MAX_MISSING:
                del self._missing[next(iter(self._missing))]
            if miss.reason == MISSING:
                self.counts.not_found += 1
            else:
                self.counts.misses[miss.reason] += 1
        if miss.reason == MISSING:
            self.uploader.note_missing(address)
        else:
            self.uploader.note_damaged(address)
            key = self.uploader.key(address)
            self.health.warnings.say(miss.reason, f"the store: {key} is {miss.reason}: {miss.detail}; it is computed again")

    def note_loaded(self, nbytes: int) -> None:
        """Count an object that was taken into the tree."""
        self.counts.loaded += 1
        self.counts.loaded_bytes += nbytes

    def clear(self, salt: str | None) -> Callable[[], None]:
        """Delete what the store has of a salt, or of this model. The returned function waits, and raises StoreError."""
        return self.uploader.clear(None if salt is None else self.keys.root(salt))

    def close(self) -> None:
        """Send what is queued, for a limited time, and end the threads. A second call does nothing."""
        if not self._is_closed:
            self.uploader.stop()
            self._is_closed = True
            self.reader.close()

    @property
    def problem(self) -> str:
        """Why the store is not read or not written now; "" if it answers."""
        return self.health.problem or self.sending.problem

    def check(self) -> None:
        self.uploader.check()
        self.reader.check()
