"""Answers to clients: streams of JSON lines (Ollama) or of server-sent events, and clients that disconnect.

However a stream ends, the answer that it reads from is closed: its lane is free again, and the computed state is kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from json.encoder import encode_basestring as _quote  # a text as JSON, as an encoder without `ensure_ascii` writes it
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

Pieces = AsyncGenerator[str, None]
Result = TypeVar("Result")

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` would make one for every value
_HOLES = ("\ue000bough\ue000", "\ue001bough\ue001")  # in place of texts; of Unicode's private use


def to_json(value: Any) -> str:
    return _ENCODER.encode(value)


class EventFrame:
    """An event that is sent many times with other texts at one or two places: everything else is written once.

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
        return "".join([before + _quote(text) for before, text in zip(self._parts, texts, strict=True)]) + self._end


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


class ClosingStream(StreamingResponse):
    """A streamed response that calls `close` however it ends. Proxies are asked not to hold its pieces back."""

    def __init__(
        self, pieces: Pieces, media_type: str, close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        usual = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, media_type=media_type, headers={**usual, **(headers or {})})
        self._pieces = pieces
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
            await self._pieces.aclose()


async def cancel_on_disconnect(
    request: Request, work: Awaitable[Result], close: Callable[[Result], object] = lambda result: None
) -> Result:
    """The result of some work. If the client disconnects first, cancels it and raises ClientDisconnect.

    A result that came in the last moment, and is not returned, is closed.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    is_taken = False
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        is_taken = True
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()
        outcome, _ = await asyncio.gather(task, disconnect, return_exceptions=True)
        if not (is_taken or isinstance(outcome, BaseException)):
            close(outcome)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
