"""Streams to clients: lines of JSON (Ollama) or server-sent events, and clients that disconnect.

However a stream ends, the answer that it reads from is closed: its lane is free again, and the computed state is kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from json.encoder import encode_basestring as _quote  # a text as JSON, as an encoder without `ensure_ascii` writes it
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bough.server.serving.answer import Answer

Result = TypeVar("Result")

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` would make one for every value
_HOLES = ("\ue000bough\ue000", "\ue001bough\ue001")  # stand for texts; they are of Unicode's private use


def to_json(value: Any) -> str:
    """Compact JSON, one line."""
    return _ENCODER.encode(value)


class EventFrame:
    """An event that is written again and again with other texts at one or two places: everything else is written once.

    `write` writes the event for given texts, and must put each into it once, as JSON.
    """

    def __init__(self, write: Callable[..., str], num_texts: int = 1) -> None:
        holes = _HOLES[:num_texts]
        self._parts: list[str] = []
        rest = write(*holes)
        for hole in holes:
            before, found, rest = rest.partition(to_json(hole))
            assert found and to_json(hole) not in rest, "each text must be written once, in the order of the arguments"
            self._parts.append(before)
        self._end = rest

    def fill(self, *texts: str) -> str:
        """The event with these texts."""
        written = "".join([before + _quote(text) for before, text in zip(self._parts, texts, strict=True)])
        return written + self._end


def json_line(value: Any) -> str:
    """A line of a stream for Ollama's clients."""
    return to_json(value) + "\n"


def sse(value: Any, event: str | None = None) -> str:
    """A server-sent event; with a name if the API gives its events names."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {value if isinstance(value, str) else to_json(value)}\n\n"


def sse_comment(text: str) -> str:
    """A comment in an event stream, which clients ignore. It keeps proxies from closing the connection."""
    return f": {text}\n\n"


class AnswerStream(StreamingResponse):
    """A response that streams pieces made of an answer, and closes the answer whatever happens."""

    def __init__(self, answer: Answer, pieces: AsyncIterator[str], media_type: str) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._answer = answer
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            close: Callable[[], Awaitable[None]] | None = getattr(self._pieces, "aclose", None)
            if close is not None:
                await close()


class ClientDisconnected(Exception):
    """The client has disconnected before its answer began."""


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work. If the client disconnects first, the work is cancelled; then raises ClientDisconnected.

    If the work opened an answer in the last moment, the answer is closed.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    is_taken = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_taken = task.done()
        if is_taken:
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, gone):
            each.cancel()
        outcome, _ = await asyncio.gather(task, gone, return_exceptions=True)
        if isinstance(outcome, Answer) and not is_taken:
            outcome.close()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
