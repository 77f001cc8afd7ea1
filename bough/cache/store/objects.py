"""What the store tier asks of a store of objects, whatever it is: a bucket, a folder, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.cache.tree.state import Buffer
from bough.errors import BoughError


class StoreError(BoughError):
    """The store did not do what it was asked: it cannot be reached, refuses, or takes too long."""


class NotPlain(StoreError):
    """In a folder, a link, a pipe or the like lies where an object or a folder should: it is left as it is."""


@dataclass(frozen=True)
class Listed:
    """An object: its key, its size, and when it was last written, by the store's clock."""

    key: str
    nbytes: int
    modified: float


@dataclass(frozen=True)
class Stored:
    """The content of an object of `nbytes` bytes, empty if these are more than asked for. `tag` stands for this version."""

    content: Buffer
    nbytes: int
    modified: float
    tag: str


class ObjectStore(Protocol):
    """Objects by key. Any thread may call. Every call may raise StoreError, and ends within a bounded time.

    A store in a folder uses plain files in plain folders alone: it raises NotPlain for a key that leads to anything else,
    and does not list it.
    """

    def get(self, key: str, max_bytes: int) -> Stored | None:
        """An object's content, which is not read if there are more than `max_bytes` of it; None if there is none."""
        ...

    def head(self, key: str) -> Listed | None:
        """An object without its content; None if there is none."""
        ...

    def put(self, key: str, content: Buffer) -> None:
        """Write an object, whatever was there."""
        ...

    def put_new(self, key: str, content: Buffer) -> bool:
        """Write an object if there is none of this key; False if there is one."""
        ...

    def replace(self, key: str, content: Buffer, tag: str) -> bool:
        """Write an object if it is still the version `tag`; False if it is not.

        A store that has no conditional writes may look first, and then write.
        """
        ...

    def list(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """All objects whose key begins with a prefix that ends with "/"; some at a time."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is no failure."""
        ...
