"""Answers with thousands of vectors, sent piece by piece.

Python writes JSON while no other thread runs, which takes a second for a million numbers. So each vector is written by
itself, on a thread, and never is the whole answer in memory.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse

from bough.server.http.streaming import to_json

_PIECE_CHARACTERS = 2**16


def write_numbers(vector: Sequence[float]) -> str:
    """A vector as a list of JSON, with the digits that a number of 32 bits has. All its numbers must be finite."""
    return f"[{('%.9g,' * len(vector) % tuple(vector))[:-1]}]"


def write_base64(vector: Sequence[float]) -> str:
    """A vector as a text of JSON: its numbers in 4 bytes each, the least significant first, in base64."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f'"{base64.b64encode(numbers).decode()}"'


def list_response(fields: dict[str, Any], name: str, entries: Iterable[str]) -> StreamingResponse:
    """An object with at least one field and a long list under this name, whose entries are JSON already."""
    return StreamingResponse(_write(fields, name, entries), media_type="application/json")


def _write(fields: dict[str, Any], name: str, entries: Iterable[str]) -> Iterator[str]:
    """The object in pieces of some length: each goes to a thread and back."""
    piece, separator = f"{to_json(fields)[:-1]},{to_json(name)}:[", ""
    for entry in entries:
        piece += separator + entry
        separator = ","
        if len(piece) >= _PIECE_CHARACTERS:
            yield piece
            piece = ""
    yield f"{piece}]}}"
