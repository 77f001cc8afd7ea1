"""The uploader: one thread that sends pages and restore points to the store, clears there, and sweeps.

Content is packed on this thread, when its turn comes; what has left memory by then is not sent. What waits is bounded by
bytes: beyond that it is dropped, and offered again when its path is used again. An object that is there is not sent, unless
it is so old that the sweep may take it, or was found damaged: so an object that is in use is sent about once a day.

Always true between calls (`check` asserts it): the bytes that wait are counted, and within the bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.cache.disk.errors import DiskMiss
from bough.cache.disk.keys import Keys
from bough.cache.store.format import MAX_LIST_BYTES, ListedPoint, Section, decode, encode, list_section, read_points
from bough.cache.store.health import Health, StoreCounts
from bough.cache.store.objects import NotPlain, ObjectStore, Stored, StoreError
from bough.cache.store.paths import LEASE, PREFIX
from bough.cache.store.sweeping import LOOK_EVERY_S, Deletions, Lease, delete_pages, sweep
from bough.cache.tree.address import Address
from bough.system.threads import lower_priority

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 512 * 2**20
SWEEP_EVERY_S = 300.0
STOP_WITHIN_S = 10.0

KNOWN_S = 600.0
"""What was seen in the store counts as there for so long; then it is looked for again: a sweep may have taken it."""

MAX_KNOWN = 100_000
REFRESH_S = 86_400.0
"""An object that is older than this, or than half the time to live, is sent again when it is used."""

LIST_BYTES = 512
"""What a list of restore points counts while it waits, and each of its points, beside their tokens."""


@dataclass(frozen=True)
class Upload:
    """An object to be sent, of about `nbytes` bytes. `read` packs it, on the uploader's thread; None: it is gone."""

    address: Address
    nbytes: int
    read: Callable[[], Sequence[Section] | None]


@dataclass(frozen=True)
class PointList:
    """The restore points of a page, and where the content of each is. Only those whose content is there are listed."""

    address: Address
    points: dict[ListedPoint, Address]

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(LIST_BYTES + len(each.tokens) for each in (self.address, *self.points.values()))


@dataclass(frozen=True)
class _Known:
    """An object that is in the store, when that was seen, and the restore points that it lists."""

    seen_s: float
    points: frozenset[ListedPoint] = frozenset()


@dataclass(eq=False)
class _Clearing:
    root: bytes | None
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Uploader:
    """Sends what is offered. Its thread begins with `start`; without it, `work` does the next thing on the calling one."""

    def __init__(
        self,
        objects: ObjectStore,
        keys: Keys,
        fingerprint: str,
        owner: str,
        health: Health,
        counts: StoreCounts,
        *,
        budget_bytes: int | None,
        ttl_s: float | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition()
        self.waiting_bytes = 0
        self.held_bytes: int | None = None  # of the whole store, at the last sweep of this process
        self._objects, self._keys, self._fingerprint = objects, keys, fingerprint
        self._health, self._counts = health, counts
        self._budget_bytes, self._ttl_s = budget_bytes, ttl_s
        self._clock, self._wall = clock, wall
        self._lease = Lease(objects, owner, wall)
        self._deletions = Deletions(objects, fingerprint, owner, wall)
        self._refresh_s = REFRESH_S if ttl_s is None else min(REFRESH_S, ttl_s / 2)
        self._waiting: dict[bytes, Upload | PointList] = {}
        self._known: dict[bytes, _Known] = {}
        self._damaged: set[bytes] = set()
        self._clearings: list[_Clearing] = []
        self._look_at = self._sweep_at = clock()
        self._sending: bytes | None = None  # the name of what is being sent
        self._is_busy = self._is_stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="bough store uploader", daemon=True)
        self._thread.start()

    def key(self, address: Address) -> str:
        """The key of an object."""
        return f"{PREFIX}{self._fingerprint}/{address.root.hex()}/{self._keys.name(address).hex()}"

    def offer(self, upload: Upload | PointList) -> None:
        """Send an object soon, if the store may lack it and not too much waits. Never waits for the store."""
        name = self._keys.name(upload.address)
        with self.changed:
            if self._is_stopping or self._is_known(name, upload):
                return
            if self._deletions.forbids(upload.address.root):
                self._counts.refused += 1
                return
            replaced = self._waiting.get(name)
            nbytes = self.waiting_bytes + upload.nbytes - (replaced.nbytes if replaced else 0)
            if nbytes > MAX_WAITING_BYTES:
                self._counts.dropped += 1
                return
            self._waiting[name] = upload
            self.waiting_bytes = nbytes
            self.changed.notify_all()

    def prioritize(self, addresses: Sequence[Address]) -> bool:
        """Send these before all else that waits; False if none of them waits or is being sent."""
        names = [self._keys.name(address) for address in addresses]
        with self.changed:
            first = {name: self._waiting[name] for name in names if name in self._waiting}
            if first:
                self._waiting = first | self._waiting
            return bool(first) or (self._sending is not None and self._sending in names)

    def _is_known(self, name: bytes, upload: Upload | PointList) -> bool:
        known = self._known.get(name)
        if known is None or name in self._damaged or self._clock() - known.seen_s > KNOWN_S:
            return False
        return isinstance(upload, Upload) or known.points >= upload.points.keys()

    def note_seen(self, address: Address, points: Sequence[ListedPoint] = ()) -> None:
        """An object was read from the store just now. Any thread may note it."""
        self._note_known(self._keys.name(address), frozenset(points))

    def note_damaged(self, address: Address) -> None:
        """An object is not what it should be: it is sent again when its content is offered next."""
        with self.changed:
            if len(self._damaged) < MAX_KNOWN:
                self._damaged.add(self._keys.name(address))

    def note_missing(self, address: Address) -> None:
        """An object is not there, or no longer: it is sent when its content is offered next."""
        with self.changed:
            self._known.pop(self._keys.name(address), None)

    def _note_known(self, name: bytes, points: frozenset[ListedPoint] = frozenset()) -> None:
        with self.changed:
            self._known.pop(name, None)
            self._known[name] = _Known(self._clock(), points)
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def clear(self, root: bytes | None) -> Callable[[], None]:
        """Delete what the store has of a root, or of this model, soon. What is returned waits for it.

        It raises StoreError if something may be left.
        """
        clearing = _Clearing(root)
        with self.changed:
            for name in [name for name, each in self._waiting.items() if root in (None, each.address.root)]:
                self.waiting_bytes -= self._waiting.pop(name).nbytes
            self._known.clear()
            self._clearings.append(clearing)
            self.changed.notify_all()

        def wait() -> None:
            while not clearing.done.is_set():
                if self._thread is not None and self._thread.is_alive():
                    clearing.done.wait(1.0)
                elif not self.work() and not clearing.done.is_set():
                    raise StoreError("the thread that clears has ended")
            if clearing.error is not None:
                raise StoreError(f"the store may still have what was to be cleared: {clearing.error}")

        return wait

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be sent; False if the time is over or the store fails."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while self._waiting or self._clearings or self._is_busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._health.is_backing_off or self._thread is None or not self._thread.is_alive():
                    return False
                self.changed.wait(min(left_s, 0.1))
        return True

    def stop(self, timeout_s: float = STOP_WITHIN_S) -> None:
        """Send what waits, for a limited time while the store answers, and end the thread."""
        if self._thread is not None:
            self.settle(timeout_s)
        with self.changed:
            self._is_stopping = True
            self._counts.dropped += len(self._waiting)
            self._waiting.clear()
            self.waiting_bytes = 0
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        lower_priority()
        while not self._is_stopping or self._clearings:
            if not self.work():
                with self.changed:
                    if not (self._is_stopping or self._clearings or (self._waiting and not self._health.is_backing_off)):
                        self.changed.wait(self._health.back_off_left_s or SWEEP_EVERY_S / 10)

    def work(self) -> bool:
        """Do the next thing there is to do: a clear, an upload or a sweep; False if there is none now."""
        with self.changed:
            clearing = self._clearings[0] if self._clearings else None
            is_backing_off = self._health.is_backing_off
            late_s = self._clock() - self._sweep_at
            is_sweep_due = not is_backing_off and late_s >= 0
            can_send = clearing is None and not is_backing_off and late_s < SWEEP_EVERY_S  # it does not wait for ever
            name = next(iter(self._waiting), None) if can_send else None
            upload = self._waiting.pop(name) if name is not None else None
            if upload is not None:
                self.waiting_bytes -= upload.nbytes
                self._sending = name
            if clearing is None and upload is None and not is_sweep_due:
                return False
            self._is_busy = clearing is not None or upload is not None
        try:
            if clearing is not None:
                self._clear(clearing)
            elif upload is not None:
                self._send(upload)
            else:
                self._sweep()
        except NotPlain as error:  # the rest of the store is as it should be
            self._counts.errors += 1
            self._health.say("not plain", f"the store: {error}; it is left as it is")
        except StoreError as error:
            self._health.fail("it could not be written", error)
        except Exception:  # our own mistake: requests go on
            log.exception("the store's uploader made a mistake")
        finally:
            with self.changed:
                self._is_busy, self._sending = False, None
                self.changed.notify_all()
        return True

    def _send(self, upload: Upload | PointList) -> None:
        if self._clock() >= self._look_at:
            self._deletions.look()
            self._look_at = self._clock() + LOOK_EVERY_S
        if self._deletions.forbids(upload.address.root):
            self._counts.refused += 1
        elif isinstance(upload, PointList):
            self._send_list(upload)
        else:
            self._send_content(upload)
        self._health.succeed()

    def _send_content(self, upload: Upload) -> None:
        name, key = self._keys.name(upload.address), self.key(upload.address)
        is_damaged = name in self._damaged
        held = self._objects.head(key)
        if held is not None and not is_damaged and self._wall() - held.modified < self._refresh_s:
            self._counts.already_there += 1
            self._note_known(name)
            return
        sections = upload.read()
        if sections is None:
            self._counts.gone += 1
            return
        content = encode(self._keys, self._fingerprint, upload.address, sections)
        if held is not None:
            self._objects.put(key, content)
            self._counts.refreshed += 1
        elif not self._objects.put_new(key, content):
            self._counts.already_there += 1
        else:
            self._counts.sent += 1
            self._counts.sent_bytes += len(content)
        self._damaged.discard(name)
        self._note_known(name)

    def _send_list(self, upload: PointList) -> None:
        """Add restore points to the list of their page. If others do so all the time, it is left for the next offer."""
        name, key = self._keys.name(upload.address), self.key(upload.address)
        points = {point for point, content in upload.points.items() if self._keys.name(content) in self._known}
        for _ in range(3):
            held = self._objects.get(key, MAX_LIST_BYTES)
            listed = self._read_list(upload.address, None if held is None else held.content)
            is_old = held is not None and self._wall() - held.modified >= self._refresh_s
            points |= listed or set()
            if listed is not None and points == listed and not is_old:
                self._counts.already_there += 1
            elif not self._write_list(key, upload.address, points, held):
                continue
            self._damaged.discard(name)
            self._note_known(name, frozenset(points))
            return

    def _write_list(self, key: str, address: Address, points: set[ListedPoint], held: Stored | None) -> bool:
        """Write a list in place of the one that was read, if there was one; False if that has changed meanwhile."""
        content = encode(self._keys, self._fingerprint, address, [list_section(address, sorted(points))])
        if held is not None:
            is_written = self._objects.replace(key, content, held.tag)
            self._counts.refreshed += is_written
            return is_written
        is_written = self._objects.put_new(key, content)
        self._counts.sent += is_written
        self._counts.sent_bytes += len(content) if is_written else 0
        return is_written

    def _read_list(self, address: Address, content: object) -> set[ListedPoint] | None:
        """The points that the store lists for a page; None if there is no list, or not a good one."""
        if not isinstance(content, bytes | bytearray | memoryview):
            return None
        try:
            return set(read_points(address, decode(self._keys, self._fingerprint, address, content)))
        except DiskMiss:
            return None

    def _clear(self, clearing: _Clearing) -> None:
        try:
            self._deletions.note(clearing.root)
            delete_pages(self._objects, self._fingerprint, clearing.root)
            self._health.succeed()
        except Exception as error:  # whatever it is, something may be left
            clearing.error = error
            raise
        finally:
            with self.changed:
                self._known.clear()  # again: something may have been on its way
                self._clearings.remove(clearing)
            clearing.done.set()

    def _sweep(self) -> None:
        self._sweep_at = self._clock() + SWEEP_EVERY_S
        if not self._lease.take():
            return
        lease = self._objects.head(LEASE)  # written just now, by the store's clock, as all that it is compared with
        if lease is None:
            return
        swept = sweep(self._objects, lease.modified, self._budget_bytes, self._ttl_s)
        self.held_bytes = swept.held_bytes
        self._counts.swept += swept.num_deleted
        self._counts.swept_bytes += swept.deleted_bytes
        if swept.num_deleted:
            with self.changed:
                self._known.clear()
        self._health.succeed()

    def check(self) -> None:
        """Assert what the module's docstring says."""
        with self.changed:
            assert self.waiting_bytes == sum(each.nbytes for each in self._waiting.values()) <= MAX_WAITING_BYTES
