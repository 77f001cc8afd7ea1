"""Answers with many vectors, as embeddings have them: written in pieces, and fast."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse

from bough.server.http.streaming import to_json

_PIECE_CHARACTERS = 2**16


def list_response(fields: dict[str, Any], name: str, entries: Iterable[str]) -> StreamingResponse:
    """An object with at least one field and a long list under this name, whose entries are JSON already."""
    return StreamingResponse(_write_list(fields, name, entries), media_type="application/json")


def _write_list(fields: dict[str, Any], name: str, entries: Iterable[str]) -> Iterator[str]:
    """The object in pieces of bounded length, each written in a thread: a million numbers at once would take a second."""
    piece, separator = f"{to_json(fields)[:-1]},{to_json(name)}:[", ""
    for entry in entries:
        piece += separator + entry
        separator = ","
        if len(piece) >= _PIECE_CHARACTERS:
            yield piece
            piece = ""
    yield f"{piece}]}}"


def write_numbers(vector: Sequence[float]) -> str:
    """A vector as a list of JSON, with the digits that a number of 32 bits has. All its numbers must be finite."""
    return f"[{('%.9g,' * len(vector) % tuple(vector))[:-1]}]"


def write_base64(vector: Sequence[float]) -> str:
    """A vector as a text of JSON: its numbers in 4 bytes each, the least significant first, in base64."""
    return f'"{base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()}"'
