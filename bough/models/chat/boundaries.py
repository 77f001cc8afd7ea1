"""Where the messages of a rendered chat end, in tokens.

A template does not say where a message ends. But a shorter or altered list of messages renders the same up to that
point. So each boundary is the longest common prefix of two renderings. It is found in the text and then mapped to
tokens: to the last token that ends there and would be the same whatever followed. Guarantee: `ids[:offset]` begins
every conversation that agrees up to that message. If a template rewrites earlier messages (some drop old thinking), the
offset is before the first change, or there is none.

The chat is tokenized once. Each boundary costs a rendering of the messages before it, unless `RenderMemo` has its length:
each request of a chat repeats all earlier messages. The hash of the current text is always compared with that of the
earlier rendering, so an outdated entry is never used.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from bough.errors import RequestError, TemplateLimit
from bough.models.chat.messages import SYSTEM_ROLES, TOOLS_TEXT
from bough.models.encoder import EncodedText
from bough.types import Boundary, Mark, Message

MAX_MESSAGE_ENDS = 64
"""In longer chats only the newest ends are found: the work for a new chat grows with the square of their number."""

_WINDOW = 32  # tokens before a boundary that are encoded again
_PROBES = ("", "\n\n", " x", "x", "0", "/")


@dataclass(frozen=True)
class RenderedChat:
    """A chat with its rendering and tokens. `render` and `encode` do the same for other messages and texts."""

    messages: list[Message]
    seed: Any  # everything that a rendering depends on besides the messages
    text: str
    encoded: EncodedText
    render: Callable[[list[Message]], str]
    encode: Callable[[str], EncodedText]


@dataclass(frozen=True)
class EarlierRendering:
    """The length and hash of an earlier rendering."""

    length: int
    digest: bytes


class RenderMemo:
    """The most recently used renderings by key. Any thread may use it."""

    def __init__(self, num_entries: int = 4096) -> None:
        self._num_entries = num_entries
        self._entries: OrderedDict[bytes, EarlierRendering] = OrderedDict()
        self._lock = Lock()

    def find(self, key: bytes) -> EarlierRendering | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def add(self, key: bytes, text: str) -> None:
        seen = EarlierRendering(len(text), Digests(text).at(len(text)))
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
    state = hashlib.blake2b(digest_size=16)
    keys = []
    for value in (seed, *messages):
        state.update(json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass") + b"\0")
        keys.append(state.digest())
    return keys


def find_boundaries(chat: RenderedChat, hard_ids: frozenset[int], memo: RenderMemo) -> list[Boundary]:
    """The boundaries of a chat by offset and worth; an offset may have two. No token merges across one of `hard_ids`."""
    offsets = _TokenOffsets(chat, hard_ids)
    positions = _TextPositions(chat, memo).all()
    found = {Boundary(offset, mark) for position, mark in positions if (offset := offsets.offset_of(position))}
    worth = list(Mark)
    return sorted(found, key=lambda boundary: (boundary.offset, worth.index(boundary.mark)))


class _TextPositions:
    """The boundaries of a chat as positions in its text."""

    def __init__(self, chat: RenderedChat, memo: RenderMemo) -> None:
        self._chat = chat
        self._text = chat.text
        self._memo = memo
        self._keys = prefix_keys(chat.seed, chat.messages)
        self._digests = Digests(chat.text)
        self._roles = [message["role"] for message in chat.messages]
        self._first = next((i for i, role in enumerate(self._roles) if role not in SYSTEM_ROLES), len(self._roles))

    def all(self) -> Iterable[tuple[int, Mark]]:
        yield self._tools_end(), Mark.SYSTEM_END
        yield self._system_end(), Mark.SYSTEM_END
        if "user" in self._roles:
            yield self._last_user_start(), Mark.LAST_USER_START
        for position in self._message_ends():
            yield position, Mark.MESSAGE_END

    def _tools_end(self) -> int:
        """Where the tools end that come before the system text, in which the sessions of an agent differ; 0 if none do."""
        tools = self._chat.messages[0].get(TOOLS_TEXT, "")
        return self._text.find(tools) + len(tools) if tools and tools in self._text else 0

    def _system_end(self) -> int:
        """Where the system part ends if it renders alone; else how far chats with another first message agree."""
        system = self._chat.messages[: self._first]
        alone = self._render(system) if system else None
        if alone and self._text.startswith(alone) and all(_content_of(message) in alone for message in system):
            return len(alone)
        return self._agreement(self._first, ("user", "assistant"))

    def _last_user_start(self) -> int:
        last = len(self._roles) - 1 - self._roles[::-1].index("user")
        if last == self._first:
            return self._system_end()
        before = self._known_length(last)
        if before is None:
            text = self._render_first(last)
            before = len(text) if text and self._text.startswith(text) else None
        if before is not None:
            return before
        return self._agreement(last, ("user",))  # earlier messages are rewritten: the offset after the message's header

    def _message_ends(self) -> Iterable[int]:
        spoken = [i for i, role in enumerate(self._roles) if role in ("user", "tool")]
        reached = 0
        for i in spoken[-MAX_MESSAGE_ENDS:]:
            position = self._known_length(i + 1) or self._message_end(i, reached)
            if position:
                reached = position
                yield position

    def _message_end(self, i: int, reached: int) -> int:
        """How far the text agrees with the rendering of the messages up to `i`; 0 if that does not include message `i`."""
        until = self._render_first(i + 1)
        if until is None:
            return 0
        position = common_length(until, self._text)
        content = _content_of(self._chat.messages[i])
        is_whole = position == len(until) or (bool(content) and content in self._text[reached:position])
        return position if is_whole else 0

    def _known_length(self, count: int) -> int | None:
        """The length of the first `count` messages, if their rendering is in the memo and this text begins with it."""
        seen = self._memo.find(self._keys[count])
        if seen is None or seen.length > len(self._text) or self._digests.at(seen.length) != seen.digest:
            return None
        return seen.length

    def _render_first(self, count: int) -> str | None:
        text = self._render(self._chat.messages[:count])
        if text is not None:
            self._memo.add(self._keys[count], text)
        return text

    def _agreement(self, i: int, roles: tuple[str, ...]) -> int:
        """How far the text agrees with chats that have another message at `i`; 0 if no such chat can be rendered."""
        kept = self._chat.messages[:i]
        real = _content_of(self._chat.messages[i]) if i < len(self._roles) else ""
        other = "y" if real.startswith("x") else "x"
        texts = [self._render([*kept, {"role": role, "content": other}]) for role in roles]
        return min((common_length(each, self._text) for each in texts if each is not None), default=0)

    def _render(self, messages: list[Message]) -> str | None:
        try:
            return self._chat.render(messages)
        except TemplateLimit:
            raise  # the next rendering would take as long
        except RequestError:
            return None  # this template requires more, or other, messages


class _TokenOffsets:
    """Maps positions in a chat's text to offsets in its tokens."""

    def __init__(self, chat: RenderedChat, hard_ids: frozenset[int]) -> None:
        self._text = chat.text
        self._encode = chat.encode
        self._ids, self._ends = chat.encoded.ids, chat.encoded.ends
        self._hard_ids = hard_ids

    def offset_of(self, position: int) -> int:
        """The number of tokens before `position` that do not depend on what follows; 0 if all of them are added tokens."""
        offset = bisect_right(self._ends, position)
        if self._hard_ids.isdisjoint(self._ids[max(0, offset - 1) : offset + 1]):
            position = len(self._text[:position].rstrip(" "))  # the space belongs to the token of the next word
            offset = self._drop_unstable(bisect_right(self._ends, position), position)
        is_all_added = self._hard_ids.issuperset(self._ids[: min(offset, _WINDOW)])
        return 0 if is_all_added else offset

    def _drop_unstable(self, offset: int, position: int) -> int:
        """Encode the last tokens again with other text after them, and go back to the last one that does not change."""
        lowest = max(0, offset - _WINDOW)
        start = self._ends[lowest - 1] if lowest else 0
        for probe in _PROBES:
            again = self._encode(self._text[start:position] + probe)
            same = set(zip(again.ids, again.ends, strict=True))
            while offset > lowest and (self._ids[offset - 1], self._ends[offset - 1] - start) not in same:
                offset -= 1
        return offset if offset > lowest else 0


def _content_of(message: Message) -> str:
    return str(message["content"]).strip()


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the longest common prefix of two texts or two lists. Costs O(n), at the speed of memory."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
