"""Leaves out the oldest messages of chats that are too long for the context.

They are left out by whole strides of the context, not one by one: so a chat that grows keeps the same beginning for many
turns, and its state can be reused. All system messages stay, and so does the last message; if that alone is too long, the
beginning of its text is cut.

Strides go by estimated sizes. Only messages that may stay are counted exactly, from the newest backwards: the work depends
on the context, not on the length of the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bough.models.chat.messages import SYSTEM_ROLES
from bough.types import Message

STRIDE = 4  # parts of the limit that are left out at a time
_ATTEMPTS = 8


class MessageCounter(Protocol):
    def estimate(self, message: Message) -> int:
        """An estimate of the tokens of a message, without encoding it."""

    def count(self, messages: Sequence[Message]) -> int:
        """The tokens of the prompt of these messages. If it is far too long, any number above the limit."""

    def cut(self, text: str, num_tokens: int, at_most: int) -> str:
        """A text without about `num_tokens` at its beginning, and of at most `at_most`."""


def shorten(messages: Sequence[Message], limit: int, measure: MessageCounter) -> list[Message]:
    """The messages without the oldest, with at most `limit` tokens; more only if nothing else can be left out."""
    first = next((i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages) - 1)
    starts = _find_starts(messages, first, max(1, limit // STRIDE), measure)
    fits = _find_first_that_fits(starts, lambda start: measure.count(_from(messages, start)) <= limit)
    if fits is not None:
        return _from(messages, fits)
    return _cut_last(_from(messages, max(first, len(messages) - 1)), limit, measure)


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """The messages from one on, and the system messages before it."""
    return [*(each for each in messages[:start] if each["role"] in SYSTEM_ROLES), *messages[start:]]


def _find_starts(messages: Sequence[Message], first: int, stride: int, measure: MessageCounter) -> list[int]:
    """The possible starts of a chat: its own, the first question behind each stride, and all behind the last stride."""
    starts, since_last, reached = [0], list[int](), 0
    sizes = [measure.estimate(message) for message in messages[first:]]
    for index, size in enumerate(sizes, first):
        if messages[index]["role"] == "user" and index > first:
            if reached // stride > 0:
                starts.append(index)
                reached %= stride
                since_last.clear()
            else:
                since_last.append(index)
        reached += size
    return starts + since_last


def _find_first_that_fits(starts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first start that fits, searched from the last one backwards in growing steps: later starts are shorter."""
    low, high, step = -1, len(starts), 1  # starts[high] fits, if there is one; starts[low] does not
    while high > 0:
        probe = max(0, high - step)
        if not fits(starts[probe]):
            low = probe
            break
        high, step = probe, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(starts[middle]):
            high = middle
        else:
            low = middle
    return starts[high] if high < len(starts) else None


def _cut_last(messages: list[Message], limit: int, measure: MessageCounter) -> list[Message]:
    for _ in range(_ATTEMPTS):
        excess = measure.count(messages) - limit
        text = messages[-1].get("content")
        if excess <= 0 or not isinstance(text, str) or not text:
            break
        messages = [*messages[:-1], {**messages[-1], "content": measure.cut(text, excess, limit)}]
    return messages
