"""Traces of message lists: a JSON list of runs, each with its messages under `traj`. One request per assistant message.

Such runs have no times and no token ids. Arrivals are drawn from a fixed seed, a token is taken to be four characters, and
a stand-in for the tools' schemas, which all runs share, comes before the first message.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from bough.errors import RequestError
from bough.replay.trace import Trace, TraceRequest
from bough.types import Boundary, Mark

BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN
REPLY_TOKENS_PER_S = 40
SECONDS_BETWEEN_RUNS = 20
SEED = 1
TOOLS = "".join(chr(ord("a") + number * 7919 % 26) for number in range(9000))


@dataclass(frozen=True)
class TraceMessage:
    """Who says what; tool calls are part of the text."""

    role: str
    text: str

    @property
    def rendered(self) -> str:
        return f"<{self.role}>{self.text}"


@dataclass(frozen=True, order=True)
class _Arrival:
    """When the assistant is asked for message `index` of a run; of equals the first run's comes first."""

    time_s: float
    run: int
    index: int


def read_runs(name: str, text: str) -> Trace:
    """The trace in this JSON list; RequestError names the run that cannot be read."""
    try:
        runs = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name}, line {error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    chats = [_messages(name, number, run) for number, run in enumerate(runs, start=1)]
    blocks = _Blocks()
    return Trace(name, BLOCK_TOKENS, [_request(at, chats[at.run], blocks) for at in sorted(_arrivals(chats))])


def _messages(name: str, number: int, run: Any) -> list[TraceMessage]:
    try:
        return [TraceMessage(each["role"], (each.get("content") or "") + _tool_calls(each)) for each in run["traj"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{name}, run {number}: no list of messages with role and content under 'traj'") from error


def _tool_calls(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return json.dumps(calls) if calls else ""


def _arrivals(chats: Sequence[Sequence[TraceMessage]]) -> Iterator[_Arrival]:
    """Runs begin at random; people think longer than tools work, and a reply takes as long as it is."""
    chance, start_s = random.Random(SEED), 0.0
    for number, chat in enumerate(chats):
        start_s += chance.expovariate(1 / SECONDS_BETWEEN_RUNS)
        now_s = start_s
        for index, message in enumerate(chat):
            if message.role == "assistant":
                yield _Arrival(now_s, number, index)
                now_s += 1 + len(message.text) / CHARS_PER_TOKEN / REPLY_TOKENS_PER_S
            elif message.role == "user":
                now_s += chance.lognormvariate(3.0, 1.0)
            else:
                now_s += chance.lognormvariate(0.7, 0.8)


class _Blocks:
    """Ids for blocks of text, by all the text up to their end."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def of(self, text: str) -> list[int]:
        digest, found = b"", []
        for end in range(BLOCK_CHARS, len(text) + 1, BLOCK_CHARS):
            digest = blake2b(digest + text[end - BLOCK_CHARS : end].encode(), digest_size=8).digest()
            found.append(self._ids.setdefault(digest, len(self._ids)))
        return found


def _request(at: _Arrival, chat: Sequence[TraceMessage], blocks: _Blocks) -> TraceRequest:
    asked = chat[: at.index]
    prompt = TOOLS + "".join(message.rendered for message in asked)
    stored = blocks.of(prompt + chat[at.index].rendered)
    tokens, num_blocks = len(prompt) // CHARS_PER_TOKEN, len(prompt) // BLOCK_CHARS
    return TraceRequest(at.time_s, tokens, stored[:num_blocks], stored, _boundaries(asked))


def _boundaries(chat: Sequence[TraceMessage]) -> tuple[Boundary, ...]:
    """Where the system part ends, the last user message begins, and messages of users and tools end, in blocks."""
    ends = list(accumulate((len(message.rendered) for message in chat), initial=len(TOOLS)))
    first = next((i for i, message in enumerate(chat) if message.role != "system"), len(chat))
    users = [i for i, message in enumerate(chat) if message.role == "user"]
    cuts = [(ends[first], Mark.SYSTEM_END), *((ends[i], Mark.LAST_USER_START) for i in users[-1:])]
    cuts += [(ends[i + 1], Mark.MESSAGE_END) for i, message in enumerate(chat) if message.role in ("user", "tool")]
    return tuple(Boundary(position // BLOCK_CHARS, mark) for position, mark in cuts)
