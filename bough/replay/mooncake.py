"""Traces in Mooncake's format: a line of JSON for each request.

`timestamp` (ms), `input_length`, `output_length` (tokens), and `hash_ids`, one for each block of 512 tokens of the prompt.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from bough.errors import RequestError
from bough.replay.trace import Trace, TraceRequest

BLOCK_TOKENS = 512
FIRST_FRESH_ID = 10**12
"""Reply blocks that appear in no later prompt get ids from here on."""

NUM_NEXT_TURNS = 4
"""The number of later prompts with the same beginning in which a reply is searched."""


def read_rows(name: str, text: str) -> Trace:
    """Read the trace in these lines. Raises RequestError, which names the line, if one cannot be read."""
    return Trace(name, BLOCK_TOKENS, list(_requests(list(_rows(name, text)))))


@dataclass(frozen=True)
class _Row:
    """One line of a Mooncake trace."""

    time_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def num_prompt_blocks(self) -> int:
        return self.input_length // BLOCK_TOKENS

    @property
    def total(self) -> int:
        return self.input_length + self.output_length

    @property
    def num_blocks(self) -> int:
        """Full blocks of prompt and reply together."""
        return self.total // BLOCK_TOKENS

    @property
    def prompt(self) -> list[int]:
        return self.hash_ids[: self.num_prompt_blocks]


def _rows(name: str, text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield _row(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(f"{name}, line {number}: {_describe(error)}") from error


def _row(fields: Any) -> _Row:
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


def _requests(rows: Sequence[_Row]) -> Iterator[TraceRequest]:
    """Make the requests. A reply's blocks get their ids from the prompt of the next turn, or new ids if there is none."""
    fresh = count(FIRST_FRESH_ID)
    users: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        for block in row.prompt:
            users.setdefault(block, []).append(number)
    for number, row in enumerate(rows):
        later = users[row.prompt[-1]] if row.prompt else []
        after = bisect_right(later, number)
        reply = _shown_reply(row, [rows[other] for other in later[after : after + NUM_NEXT_TURNS]])
        if reply is None:
            reply = list(islice(fresh, row.num_blocks - row.num_prompt_blocks))
        yield TraceRequest(row.time_ms / 1000, row.input_length, row.prompt, row.prompt + reply)


def _shown_reply(row: _Row, later: Iterable[_Row]) -> list[int] | None:
    """The ids of a reply's blocks, from the first later prompt that is long enough to contain the reply."""
    shown = (other.hash_ids[row.num_prompt_blocks : row.num_blocks] for other in later if other.input_length >= row.total)
    return next(shown, None)
