"""Chats that are too long for the context: which of their oldest messages are left out.

Messages are left out by whole strides of the context, not one by one: so a chat that goes on keeps the same beginning for
many turns, and its state can be reused. System messages stay, wherever they are, and so does the last message; if that
alone is too long, the beginning of its text goes.

Where strides begin is told by the estimated sizes of messages. Only what may be kept is counted exactly, from the newest
message backwards: the work depends on the context, not on the length of the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bough.models.chat.messages import SYSTEM_ROLES
from bough.types import Message

STRIDE = 4  # parts of the limit that are left out at a time
_ATTEMPTS = 8


class Measure(Protocol):
    """Counts the tokens of messages."""

    def estimate(self, message: Message) -> int:
        """An estimate of the tokens of a message, without encoding it."""
        ...

    def count(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt of these messages has. For one that is far too long, any number above the limit."""
        ...

    def cut(self, text: str, num_tokens: int, at_most: int) -> str:
        """The end of a text: without about so many tokens at its beginning, and of at most so many."""
        ...


def shorten(messages: Sequence[Message], limit: int, measure: Measure) -> list[Message]:
    """The messages with as many of the oldest left out as it takes to have at most `limit` tokens.

    The result may still be too long if nothing helps.
    """
    first = next((i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages) - 1)
    starts = _find_starts(messages, first, max(1, limit // STRIDE), measure)
    fits = _find_first_that_fits(starts, lambda start: measure.count(_from(messages, start)) <= limit)
    if fits is not None:
        return _from(messages, fits)
    return _cut_last(_from(messages, max(first, len(messages) - 1)), limit, measure)


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """The messages from one on, and the system messages before it."""
    return [*(each for each in messages[:start] if each["role"] in SYSTEM_ROLES), *messages[start:]]


def _find_starts(messages: Sequence[Message], first: int, stride: int, measure: Measure) -> list[int]:
    """Where a chat may begin: at its beginning, at the first question behind each stride, and behind the last stride at
    every question."""
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
    """The first start that fits, looked for from the last one backwards in growing steps: what begins later is shorter."""
    low, high, step = -1, len(starts), 1  # what begins at starts[high] fits, if there is one; at starts[low] it does not
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


def _cut_last(messages: list[Message], limit: int, measure: Measure) -> list[Message]:
    for _ in range(_ATTEMPTS):
        excess = measure.count(messages) - limit
        text = messages[-1].get("content")
        if excess <= 0 or not isinstance(text, str) or not text:
            break
        messages = [*messages[:-1], {**messages[-1], "content": measure.cut(text, excess, limit)}]
    return messages
