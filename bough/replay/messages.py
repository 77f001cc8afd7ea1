"""Traces of message lists: a JSON list of runs, each with its messages under `traj`. Each assistant message is a request.

Such runs have no times and no token ids. Arrival times are drawn from a fixed seed, a token is four characters, and every
prompt begins with the same text, which stands for the schemas of the tools.
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
    """A role and a text, which includes the tool calls."""

    role: str
    text: str

    @property
    def rendered(self) -> str:
        return f"<{self.role}>{self.text}"


@dataclass(frozen=True, order=True)
class _Arrival:
    """The time at which a run requests its message `index`. At equal times the earlier run comes first."""

    time_s: float
    run: int
    index: int


def read_runs(name: str, text: str) -> Trace:
    """Read the trace in this JSON list. Raises RequestError, which names the run, if one cannot be read."""
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
    """Draw the arrival times: runs start at random, users take longer than tools, and a reply takes time by its length."""
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
    """Gives blocks of text their ids. Two blocks have the same id if all text up to their ends is equal."""

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
    """The ends of the system part and of user and tool messages, and the start of the last user message, in blocks."""
    ends = list(accumulate((len(message.rendered) for message in chat), initial=len(TOOLS)))
    first = next((i for i, message in enumerate(chat) if message.role != "system"), len(chat))
    users = [i for i, message in enumerate(chat) if message.role == "user"]
    cuts = [(ends[first], Mark.SYSTEM_END), *((ends[i], Mark.LAST_USER_START) for i in users[-1:])]
    cuts += [(ends[i + 1], Mark.MESSAGE_END) for i, message in enumerate(chat) if message.role in ("user", "tool")]
    return tuple(Boundary(position // BLOCK_CHARS, mark) for position, mark in cuts)
