"""A store of objects in memory that can be slow, fail and corrupt; and a shared store over it that has no threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from bough.cache.disk.reader import DiskReader
from bough.cache.store import ListedObject, SharedStore, StoredObject, StoreError
from bough.cache.store.format import PAGE_KEY, Object
from bough.cache.tree.address import Address
from bough.cache.tree.state import Buffer
from tests.fake_disk import FakeReader

SECRET = bytes(range(32))
FINGERPRINT = "f00d" * 16


class FakeObjects:
    """Objects in a dict. `fault` is asked before every call, by its name and key: it may raise, or wait.

    `corrupt` gets what is read, and returns what the reader shall see.
    """

    def __init__(self, wall: Callable[[], float] = lambda: 1000.0) -> None:
        self.objects: dict[str, tuple[bytes, float, int]] = {}
        self.calls: Counter[str] = Counter()
        self.fault: Callable[[str, str], None] = lambda call, key: None
        self.corrupt: Callable[[str, bytes], bytes] = lambda key, content: content
        self._wall = wall
        self._lock = threading.Lock()
        self._version = 0

    def _note(self, call: str, key: str) -> None:
        with self._lock:
            self.calls[call] += 1
        self.fault(call, key)

    def get(self, key: str, max_bytes: int) -> StoredObject | None:
        self._note("get", key)
        found = self.objects.get(key)
        if found is None:
            return None
        content = self.corrupt(key, found[0])
        return StoredObject(content if len(content) <= max_bytes else b"", len(content), found[1], str(found[2]))

    def head(self, key: str) -> ListedObject | None:
        self._note("head", key)
        found = self.objects.get(key)
        return None if found is None else ListedObject(key, len(found[0]), found[1])

    def put(self, key: str, content: Buffer) -> None:
        self._note("put", key)
        with self._lock:
            self._write(key, content)

    def put_new(self, key: str, content: Buffer) -> bool:
        self._note("put_new", key)
        with self._lock:
            return key not in self.objects and self._write(key, content)

    def replace(self, key: str, content: Buffer, tag: str) -> bool:
        self._note("replace", key)
        with self._lock:
            return key in self.objects and str(self.objects[key][2]) == tag and self._write(key, content)

    def _write(self, key: str, content: Buffer) -> bool:
        self._version += 1
        self.objects[key] = (bytes(content), self._wall(), self._version)
        return True

    def list(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        self._note("list", prefix)
        yield [
            ListedObject(key, len(each[0]), each[1]) for key, each in list(self.objects.items()) if key.startswith(prefix)
        ]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._note("delete", key)
            self.objects.pop(key, None)

    @property
    def pages(self) -> list[str]:
        """The keys of what was sent, without leases and lists of deletions."""
        return [key for key in self.objects if PAGE_KEY.fullmatch(key)]


def failing(*calls: str) -> Callable[[str, str], None]:
    """A fault: these calls fail."""

    def fault(call: str, key: str) -> None:
        if call in calls:
            raise StoreError(f"{call} was made to fail")

    return fault


def make_owner(name: str) -> str:
    """A machine's name as the store wants it."""
    return sha256(name.encode()).hexdigest()[:16]


class StepStore(SharedStore):
    """A shared store that does nothing by itself: `work` sends what waits, and reads end when somebody waits for them."""

    def __init__(self, objects: FakeObjects, page_tokens: int = 2, owner: str = "first", **options: Any) -> None:
        self.warnings: list[str] = []
        self.now = 0.0
        known = {"secret": SECRET, "fingerprint": FINGERPRINT, "owner": make_owner(owner), "wall": lambda: 1000.0}
        super().__init__(
            objects, page_tokens=page_tokens, clock=lambda: self.now, warn=self.warnings.append, **{**known, **options}
        )

    def _make_reader(self) -> DiskReader[Address, Object]:
        return FakeReader(self.read)

    def _start(self) -> None:
        """There are no threads."""

    def work(self) -> None:
        """Send what waits."""
        while self.uploader.work():
            pass
