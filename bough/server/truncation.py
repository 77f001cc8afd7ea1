"""Chats that are too long for the context: which of their oldest messages are left out.

Messages are left out by whole strides of the context, not one by one: so a chat that goes on keeps the same beginning for
many turns, and its state can be reused. System messages stay, wherever they are, and so does the last message; if that
alone is too long, the beginning of its text goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from bough.models.messages import SYSTEM_ROLES
from bough.types import Message

STRIDE = 4  # parts of the limit that are left out at a time
_ATTEMPTS = 8

Count = Callable[[Sequence[Message]], int]
"""How many tokens the prompt of these messages has."""


def shorten(messages: Sequence[Message], limit: int, count: Count, cut: Callable[[str, int], str]) -> list[Message]:
    """The messages with as many of the oldest left out as it takes to have at most `limit` tokens.

    `cut(text, n)` takes about n tokens off the beginning of a text. The result may still be too long if nothing helps.
    """
    total = count(messages)
    if total <= limit:
        return list(messages)
    first = next((i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages) - 1)
    kept = _from(messages, _start(messages, first, total, limit, count))
    return _cut_last(kept, limit, count, cut)


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """The messages from one on, and the system messages before it."""
    return [*(each for each in messages[:start] if each["role"] in SYSTEM_ROLES), *messages[start:]]


def _start(messages: Sequence[Message], first: int, total: int, limit: int, count: Count) -> int:
    """Where the chat goes on after what is left out: at a user's message, or else at the last one."""
    stride = max(1, limit // STRIDE)
    wanted = -(-(total - limit) // stride) * stride
    starts = [i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"]

    def dropped(start: int) -> int:
        return total - count(_from(messages, start))

    place = bisect_left(starts, wanted, key=dropped)
    return starts[place] if place < len(starts) else max(first, len(messages) - 1)


def _cut_last(messages: list[Message], limit: int, count: Count, cut: Callable[[str, int], str]) -> list[Message]:
    for _ in range(_ATTEMPTS):
        excess = count(messages) - limit
        text = messages[-1].get("content")
        if excess <= 0 or not isinstance(text, str) or not text:
            break
        messages = [*messages[:-1], {**messages[-1], "content": cut(text, excess)}]
    return messages
