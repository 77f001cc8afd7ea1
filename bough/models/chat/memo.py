"""What earlier renderings of the same messages came to, so that a growing chat is not rendered anew at every message.

A turn of a chat repeats all earlier ones. For the first n messages the memo keeps the length and the hash of their
rendering; if the new text begins with just that, nothing has to be rendered to know where they end. What the template says
now is always compared, by its hash: an entry that no longer holds is not used.
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
    """A rendering that was seen."""

    length: int
    digest: bytes


class RenderMemo:
    """Renderings by key, the most recently used ones; for any thread."""

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
    """Hashes of a text's beginnings; asking for longer and longer ones reads the text once."""

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
    """A key for the first n messages, for each n from 0 on; `seed` is all else that the rendering depends on."""
    state = hashlib.blake2b(_packed(seed), digest_size=16)
    keys = [state.digest()]
    for message in messages:
        state.update(_packed(message))
        keys.append(state.digest())
    return keys


def _packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass") + b"\0"
