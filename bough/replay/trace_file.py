"""Reads a trace file of either format, also gzipped.

Mooncake's format is a line of JSON for each request: `timestamp` (ms), `input_length`, `output_length` (tokens), and
`hash_ids`, one for each block of 512 tokens of the prompt.

A file that begins with `[` is a JSON list of runs, each with its messages under `traj`; each assistant message is a
request. Such runs have no times and no token ids: arrival times are drawn from a fixed seed, a token is four characters,
and every prompt begins with the same text, which stands for the schemas of the tools.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from bough.errors import RequestError
from bough.replay.trace import Trace, TraceRequest
from bough.types import Boundary, Mark

ROW_BLOCK_TOKENS = 512
FIRST_FRESH_ID = 10**12
"""Reply blocks that appear in no later prompt get ids from here on."""

NUM_NEXT_TURNS = 4
"""The number of later prompts with the same beginning in which a reply is searched."""

RUN_BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
BLOCK_CHARS = RUN_BLOCK_TOKENS * CHARS_PER_TOKEN
REPLY_TOKENS_PER_S = 40
SECONDS_BETWEEN_RUNS = 20
SEED = 1
TOOLS = "".join(chr(ord("a") + number * 7919 % 26) for number in range(9000))


def read_trace(file: Path) -> Trace:
    """Read the requests of a trace file. Raises RequestError, with the position, if it cannot be read."""
    text = _read_text(file)
    trace = (_read_runs if text.lstrip().startswith("[") else _read_rows)(file.name, text)
    if not trace.num_blocks:
        raise RequestError(f"{file.name}: the trace has {len(trace.requests)} requests and no full block")
    return trace


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError as error:
        raise RequestError(f"there is no file {file}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}") from error


@dataclass(frozen=True)
class _Row:
    time_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def num_prompt_blocks(self) -> int:
        return self.input_length // ROW_BLOCK_TOKENS

    @property
    def total(self) -> int:
        return self.input_length + self.output_length

    @property
    def num_blocks(self) -> int:
        """Full blocks of prompt and reply together."""
        return self.total // ROW_BLOCK_TOKENS

    @property
    def prompt(self) -> list[int]:
        return self.hash_ids[: self.num_prompt_blocks]


def _read_rows(name: str, text: str) -> Trace:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(_read_row(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(f"{name}, line {number}: {_describe(error)}") from error
    return Trace(name, ROW_BLOCK_TOKENS, list(_row_requests(rows)))


def _read_row(fields: Any) -> _Row:
    if not isinstance(fields, dict):
        raise TypeError(f"a request is a JSON object, not {type(fields).__name__}")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
        raise TypeError("hash_ids must be a list of integers")
    row = _Row(float(fields["timestamp"]), int(fields["input_length"]), int(fields["output_length"]), ids)
    if min(row.input_length, row.output_length) < 0:
        raise ValueError(f"lengths of {row.input_length} and {row.output_length} tokens; they must be at least 0")
    return row


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _row_requests(rows: Sequence[_Row]) -> Iterator[TraceRequest]:
    """Make the requests. A reply's blocks get their ids from the prompt of the next turn, or new ids if there is none."""
    fresh = count(FIRST_FRESH_ID)
    users: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        for block in row.prompt:
            users.setdefault(block, []).append(number)
    for number, row in enumerate(rows):
        later = users[row.prompt[-1]] if row.prompt else []
        after = bisect_right(later, number)
        turns = (rows[other] for other in later[after : after + NUM_NEXT_TURNS])
        shown = next((turn.hash_ids for turn in turns if turn.input_length >= row.total), None)  # it contains the reply
        if shown is not None:
            reply = shown[row.num_prompt_blocks : row.num_blocks]
        else:
            reply = list(islice(fresh, row.num_blocks - row.num_prompt_blocks))
        yield TraceRequest(row.time_ms / 1000, row.input_length, row.prompt, row.prompt + reply)


@dataclass(frozen=True)
class _RunMessage:
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


def _read_runs(name: str, text: str) -> Trace:
    try:
        runs = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name}, line {error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    chats = [_read_messages(name, number, run) for number, run in enumerate(runs, start=1)]
    blocks = _TextBlocks()
    return Trace(name, RUN_BLOCK_TOKENS, [_run_request(at, chats[at.run], blocks) for at in sorted(_arrivals(chats))])


def _read_messages(name: str, number: int, run: Any) -> list[_RunMessage]:
    try:
        return [_RunMessage(each["role"], (each.get("content") or "") + _tool_calls(each)) for each in run["traj"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{name}, run {number}: no list of messages with role and content under 'traj'") from error


def _tool_calls(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return json.dumps(calls) if calls else ""


def _arrivals(chats: Sequence[Sequence[_RunMessage]]) -> Iterator[_Arrival]:
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


class _TextBlocks:
    """Gives blocks of text their ids. Two blocks have the same id if all text up to their ends is equal."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def of(self, text: str) -> list[int]:
        digest, found = b"", []
        for end in range(BLOCK_CHARS, len(text) + 1, BLOCK_CHARS):
            digest = blake2b(digest + text[end - BLOCK_CHARS : end].encode(), digest_size=8).digest()
            found.append(self._ids.setdefault(digest, len(self._ids)))
        return found


def _run_request(at: _Arrival, chat: Sequence[_RunMessage], blocks: _TextBlocks) -> TraceRequest:
    before = chat[: at.index]
    prompt = TOOLS + "".join(message.rendered for message in before)
    stored = blocks.of(prompt + chat[at.index].rendered)
    tokens, num_blocks = len(prompt) // CHARS_PER_TOKEN, len(prompt) // BLOCK_CHARS
    return TraceRequest(at.time_s, tokens, stored[:num_blocks], stored, _boundaries(before))


def _boundaries(chat: Sequence[_RunMessage]) -> tuple[Boundary, ...]:
    """The ends of the system part and of user and tool messages, and the start of the last user message, in blocks."""
    ends = list(accumulate((len(message.rendered) for message in chat), initial=len(TOOLS)))
    first = next((i for i, message in enumerate(chat) if message.role != "system"), len(chat))
    users = [i for i, message in enumerate(chat) if message.role == "user"]
    cuts = [(ends[first], Mark.SYSTEM_END), *((ends[i], Mark.LAST_USER_START) for i in users[-1:])]
    cuts += [(ends[i + 1], Mark.MESSAGE_END) for i, message in enumerate(chat) if message.role in ("user", "tool")]
    return tuple(Boundary(position // BLOCK_CHARS, mark) for position, mark in cuts)
