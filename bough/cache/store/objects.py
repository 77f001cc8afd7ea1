"""The interface to a store of objects (a bucket, a folder, memory), and whether it answers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bough.cache.disk.errors import Warnings
from bough.cache.tree.state import Buffer
from bough.errors import BoughError

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0


class StoreError(BoughError):
    """The store cannot be reached, refuses, or takes too long."""


class NotPlain(StoreError):
    """In a folder, there is a link, a pipe or the like in place of an object or a folder: it is left as it is."""


@dataclass(frozen=True)
class ListedObject:
    """An object: its key, its size, and when it was last written, by the store's clock."""

    key: str
    nbytes: int
    modified: float


@dataclass(frozen=True)
class StoredObject:
    """An object of `nbytes` bytes; `content` is empty if these are too many. `tag` identifies this version."""

    content: Buffer
    nbytes: int
    modified: float
    tag: str


class ObjectStore(Protocol):
    """Objects by key, for any thread. Every call may raise StoreError, and ends within a bounded time.

    A store in a folder uses only plain files in plain folders: it raises NotPlain for a key that leads to anything else,
    and does not list it.
    """

    def get(self, key: str, max_bytes: int) -> StoredObject | None:
        """An object, with its content if that is at most `max_bytes`; None if there is no object."""

    def head(self, key: str) -> ListedObject | None:
        """An object without its content; None if there is no object."""

    def put(self, key: str, content: Buffer) -> None:
        """Write or overwrite an object."""

    def put_new(self, key: str, content: Buffer) -> bool:
        """Write an object if this key is free; False if it is not."""

    def replace(self, key: str, content: Buffer, tag: str) -> bool:
        """Write an object if it is still the version `tag`; False if it is not.

        A store that has no conditional writes may look first, and then write.
        """

    def list(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        """All objects whose key begins with a prefix that ends with "/", in parts."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete those of the objects that exist."""


@dataclass
class StoreCounts:
    """Objects sent and read, and those that were not.

    `sent` were missing in the store, `already_there` were not. `refreshed` were sent again because they were old or
    damaged, or because a list has grown. `dropped` were not sent because the queue was full, `gone` because their content
    had left memory, `refused` because they were cleared lately.
    """

    sent: int = 0
    sent_bytes: int = 0
    already_there: int = 0
    refreshed: int = 0
    dropped: int = 0
    gone: int = 0
    refused: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    not_found: int = 0
    errors: int = 0
    swept: int = 0
    swept_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class Health:
    """Whether the store answers. After a failure it backs off for 1 to 60 s. Any thread may call."""

    def __init__(self, counts: StoreCounts, clock: Callable[[], float], warn: Callable[[str], None]) -> None:
        self.problem = ""
        self._counts, self._clock = counts, clock
        self.warnings = Warnings(warn)
        self._lock = threading.Lock()
        self._until = 0.0
        self._back_off_s = FIRST_BACK_OFF_S

    @property
    def is_backing_off(self) -> bool:
        return self._clock() < self._until

    @property
    def back_off_left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    def fail(self, what: str, error: Exception) -> None:
        """Note a failure and back off. Only the first in a row is logged."""
        with self._lock:
            self._counts.errors += 1
            is_new, self.problem = not self.problem, f"{what}: {error}"
            if not self.is_backing_off:  # else it is another of the calls that were under way
                self._until = self._clock() + self._back_off_s
                self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)
        if is_new:
            self.warnings.say("failure", f"the store: {self.problem}; answers go on without it")

    def succeed(self) -> None:
        if self.problem:
            with self._lock:
                self.problem, self._until, self._back_off_s = "", 0.0, FIRST_BACK_OFF_S
