"""The uploader: one thread that sends pages and restore points to the store, clears there, and sweeps.

Content is packed on this thread, right before it is sent; what has left memory by then is not sent. The queue is bounded by
bytes: beyond that uploads are dropped, and offered again when their path is used again. An object that exists is not sent,
unless it was found damaged, or is so old that the sweep may delete it: an object in use is sent about once a day.

Always true between calls (`check` asserts it): the bytes in the queue are counted, and within the bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bough.cache.disk.errors import DiskMiss
from bough.cache.disk.keys import PageKeys
from bough.cache.disk.writer import Clearing
from bough.cache.store.format import (
    LEASE,
    MAX_LIST_BYTES,
    PREFIX,
    ListedPoint,
    Section,
    decode,
    encode,
    list_section,
    read_points,
)
from bough.cache.store.objects import Health, NotPlain, ObjectStore, StoreCounts, StoredObject, StoreError
from bough.cache.store.sweeping import LOOK_EVERY_S, Deletions, delete_pages, sweep, take_lease
from bough.cache.tree.address import Address
from bough.cache.tree.state import Buffer
from bough.system.threads import lower_priority

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 512 * 2**20
SWEEP_EVERY_S = 300.0
STOP_WITHIN_S = 10.0

KNOWN_S = 600.0
"""How long an object that was seen in the store is taken to be there: a sweep may have deleted it."""

MAX_KNOWN = 100_000
REFRESH_S = 86_400.0
"""An object older than this, or than half the time to live, is sent again when it is used."""

LIST_BYTES = 512
"""Bytes that a queued list of restore points, and each of its points, counts besides tokens."""


@dataclass(frozen=True)
class Upload:
    """An object to be sent, of about `nbytes` bytes. `read` packs it on the uploader's thread; None: it is gone."""

    address: Address
    nbytes: int
    read: Callable[[], Sequence[Section] | None]


@dataclass(frozen=True)
class PointList:
    """The restore points of a page with the addresses of their content. Only those whose content is stored are listed."""

    address: Address
    points: dict[ListedPoint, Address]

    @property
    def nbytes(self) -> int:
        return sum(LIST_BYTES + len(each.tokens) for each in (self.address, *self.points.values()))


@dataclass(frozen=True)
class _Known:
    """When an object was seen in the store, and the restore points that it lists."""

    seen_s: float
    points: frozenset[ListedPoint]


class Uploader:
    """Sends what is offered, on a thread that begins with `start`; without it, on threads that call `work`."""

    def __init__(
        self,
        objects: ObjectStore,
        keys: PageKeys,
        owner: str,
        health: Health,
        counts: StoreCounts,
        budget_bytes: int | None,
        ttl_s: float | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition()
        self.waiting_bytes = 0
        self.held_bytes: int | None = None  # of the whole store, at the last sweep of this process
        self._objects, self._keys = objects, keys
        self._health, self._counts = health, counts
        self._budget_bytes, self._ttl_s = budget_bytes, ttl_s
        self._clock, self._wall = clock, wall
        self._owner = owner
        self._deletions = Deletions(objects, keys.fingerprint, owner, wall)
        self._refresh_s = REFRESH_S if ttl_s is None else min(REFRESH_S, ttl_s / 2)
        self._waiting: dict[bytes, Upload | PointList] = {}
        self._known: dict[bytes, _Known] = {}
        self._damaged: set[bytes] = set()
        self._clearings: list[Clearing] = []
        self._look_at = self._sweep_at = clock()
        self._sending: bytes | None = None  # the name of what is being sent
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="bough store uploader", daemon=True)
        self._thread.start()

    def key(self, address: Address) -> str:
        return f"{PREFIX}{self._keys.fingerprint}/{address.root.hex()}/{self._keys.name(address).hex()}"

    def offer(self, upload: Upload | PointList) -> None:
        """Queue an object, if the store may lack it and the queue has room. Never waits for the store."""
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
        """Send these before all else; False if none of them is queued or being sent."""
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

    def note_seen(self, address: Address, points: Iterable[ListedPoint] = ()) -> None:
        """An object was just seen in the store, or written to it. Any thread may call this."""
        name = self._keys.name(address)
        with self.changed:
            self._known.pop(name, None)
            self._known[name] = _Known(self._clock(), frozenset(points))
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def note_damaged(self, address: Address) -> None:
        """Have a damaged object sent again when its content is offered next."""
        with self.changed:
            if len(self._damaged) < MAX_KNOWN:
                self._damaged.add(self._keys.name(address))

    def note_missing(self, address: Address) -> None:
        """Have a missing object sent when its content is offered next."""
        with self.changed:
            self._known.pop(self._keys.name(address), None)

    def clear(self, root: bytes | None) -> Callable[[], None]:
        """Delete what the store has of a root, or of this model, soon.

        The returned function waits for it, and raises StoreError if something may be left.
        """
        clearing = Clearing(root)
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
        """Wait until the queue is empty; False if the time is over or the store fails."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while self._waiting or self._clearings or self._sending:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._health.is_backing_off or self._thread is None or not self._thread.is_alive():
                    return False
                self.changed.wait(min(left_s, 0.1))
        return True

    def stop(self, timeout_s: float = STOP_WITHIN_S) -> None:
        """Send what is queued, for a limited time while the store answers, and end the thread."""
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
        """Do the next task: a clear, an upload or a sweep; False if there is none now."""
        with self.changed:
            task = self._take_task()
        if task is None:
            return False
        try:
            task()
        except NotPlain as error:  # the rest of the store is as it should be
            self._counts.errors += 1
            self._health.warnings.say("not plain", f"the store: {error}; it is left as it is")
        except StoreError as error:
            self._health.fail("it could not be written", error)
        except Exception:  # our own mistake: requests go on
            log.exception("the store's uploader made a mistake")
        finally:
            with self.changed:
                self._sending = None
                self.changed.notify_all()
        return True

    def _take_task(self) -> Callable[[], None] | None:
        if self._clearings:
            return partial(self._clear, self._clearings[0])
        if self._health.is_backing_off:
            return None
        late_s = self._clock() - self._sweep_at
        if self._waiting and late_s < SWEEP_EVERY_S:  # a sweep is not put off for ever
            self._sending = next(iter(self._waiting))
            upload = self._waiting.pop(self._sending)
            self.waiting_bytes -= upload.nbytes
            return partial(self._send, upload)
        return self._sweep if late_s >= 0 else None

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

    def _put_new(self, key: str, content: bytes) -> bool:
        is_new = self._objects.put_new(key, content)
        self._counts.sent += is_new
        self._counts.sent_bytes += is_new * len(content)
        return is_new

    def _send_content(self, upload: Upload) -> None:
        name, key = self._keys.name(upload.address), self.key(upload.address)
        held = self._objects.head(key)
        if held is not None and name not in self._damaged and self._wall() - held.modified < self._refresh_s:
            self._counts.already_there += 1
            self.note_seen(upload.address)
            return
        sections = upload.read()
        if sections is None:
            self._counts.gone += 1
            return
        content = encode(self._keys, upload.address, sections)
        if held is not None:
            self._objects.put(key, content)
            self._counts.refreshed += 1
        else:
            self._counts.already_there += not self._put_new(key, content)
        self._damaged.discard(name)
        self.note_seen(upload.address)

    def _send_list(self, upload: PointList) -> None:
        """Add restore points to the list of their page. After three conflicts with others, leave it for the next offer."""
        name, key = self._keys.name(upload.address), self.key(upload.address)
        points = {point for point, content in upload.points.items() if self._keys.name(content) in self._known}
        for _ in range(3):
            held = self._objects.get(key, MAX_LIST_BYTES)
            listed = None if held is None else self._read_list(upload.address, held.content)
            is_old = held is not None and self._wall() - held.modified >= self._refresh_s
            points |= listed or set()
            if listed is not None and points == listed and not is_old:
                self._counts.already_there += 1
            elif not self._write_list(key, upload.address, points, held):
                continue
            self._damaged.discard(name)
            self.note_seen(upload.address, points)
            return

    def _write_list(self, key: str, address: Address, points: set[ListedPoint], held: StoredObject | None) -> bool:
        """Write a list, or replace the one that was read; False if it has changed meanwhile."""
        content = encode(self._keys, address, [list_section(address, sorted(points))])
        if held is None:
            return self._put_new(key, content)
        is_replaced = self._objects.replace(key, content, held.tag)
        self._counts.refreshed += is_replaced
        return is_replaced

    def _read_list(self, address: Address, content: Buffer) -> set[ListedPoint] | None:
        """The points in the list of a page; None if it is damaged."""
        try:
            return set(read_points(address, decode(self._keys, address, content)))
        except DiskMiss:
            return None

    def _clear(self, clearing: Clearing) -> None:
        try:
            self._deletions.note(clearing.root)
            delete_pages(self._objects, self._keys.fingerprint, clearing.root)
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
        if not take_lease(self._objects, self._owner, self._wall()):
            return
        lease = self._objects.head(LEASE)  # just written: it has the time of the store's clock
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
        with self.changed:
            assert self.waiting_bytes == sum(each.nbytes for each in self._waiting.values()) <= MAX_WAITING_BYTES
