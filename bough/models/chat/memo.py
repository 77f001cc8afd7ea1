"""A memo of earlier renderings, so that a growing chat is not rendered again for every message.

Each request of a chat repeats all earlier messages. For the first n messages the memo has the length and the hash of their
rendering. If the new text begins with the same, its length is known without a rendering. The hash of the current text is
always compared, so an outdated entry is never used.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Seen:
    """The length and hash of an earlier rendering."""

    length: int
    digest: bytes


class RenderMemo:
    """The most recently used renderings by key. Any thread may use it."""

    def __init__(self, num_entries: int = 4096) -> None:
        self._num_entries = num_entries
        self._entries: OrderedDict[bytes, Seen] = OrderedDict()
        self._lock = Lock()

    def find(self, key: bytes) -> Seen | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def add(self, key: bytes, text: str) -> None:
        seen = Seen(len(text), Digests(text).at(len(text)))
        with self._lock:
            self._entries[key] = seen
            self._entries.move_to_end(key)
            if len(self._entries) > self._num_entries:
                self._entries.popitem(last=False)


class Digests:
    """Hashes of the prefixes of a text. Growing lengths read the text only once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._state = hashlib.blake2b(digest_size=16)

    def at(self, length: int) -> bytes:
        if length < self._position:
            self._position = 0
            self._state = hashlib.blake2b(digest_size=16)
        self._state.update(self._text[self._position : length].encode("utf-8", "surrogatepass"))
        self._position = length
        return self._state.digest()


def prefix_keys(seed: Any, messages: Sequence[Any]) -> list[bytes]:
    """A key for the first n messages, for each n from 0 on; `seed` is everything else that the rendering depends on."""
    state = hashlib.blake2b(_packed(seed), digest_size=16)
    keys = [state.digest()]
    for message in messages:
        state.update(_packed(message))
        keys.append(state.digest())
    return keys


def _packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass") + b"\0"
