"""Answers to clients: streams of JSON lines (Ollama) or of server-sent events, lists of vectors, clients that disconnect.

However a stream ends, the answer that it reads from is closed: its lane is free again, and the computed state is kept.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as _quote  # a text as JSON, as an encoder without `ensure_ascii` writes it
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from bough.server.serving.answer import Answer
from bough.server.serving.ask import Answered, Ask, PromptProgress, ScoredToken, Started
from bough.server.serving.service import Service

Pieces = AsyncGenerator[str, None]
Result = TypeVar("Result")
Body = TypeVar("Body", bound="StreamableBody")

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` would make one for every value
_HOLES = ("\ue000bough\ue000", "\ue001bough\ue001")  # in place of texts; of Unicode's private use
_PIECE_CHARACTERS = 2**16


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


def progress_comment(progress: PromptProgress) -> str:
    """A comment for the progress of a long prompt; "" at its end, where the answer begins."""
    if progress.done_tokens >= progress.total_tokens:
        return ""
    return sse_comment(f"prefill {progress.done_tokens}/{progress.total_tokens}")


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


class StreamableBody(Protocol):
    """The body of a request that may ask for a stream."""

    @property
    def stream(self) -> bool | None: ...


async def answer_ask(
    request: Request,
    service: Service,
    ask: Ask,
    body: Body,
    write_whole: Callable[[Answered, Body], Any],
    write_events: Callable[[Answer, Body], Pieces],
) -> Response:
    """Answer an ask as events, or whole as JSON. Raises the error of a request that fails before its answer begins."""
    if not body.stream:
        answered = await cancel_on_disconnect(request, service.complete(ask))
        return JSONResponse(write_whole(answered, body), headers=write_left_out(answered.started))
    answer = await cancel_on_disconnect(request, service.open(ask))
    return ClosingStream(write_events(answer, body), EVENT_STREAM, answer.close, write_left_out(answer.started))


def write_left_out(started: Started) -> dict[str, str]:
    """Headers that say what the prompt lacks; none if it is whole."""
    left_out = started.left_out
    headers = {"X-Bough-Messages-Left-Out": str(left_out.num_messages)} if left_out.num_messages else {}
    return headers | ({"X-Bough-Text-Cut": "true"} if left_out.is_text_cut else {})


def write_logprobs(logprobs: Sequence[ScoredToken], least: float = -math.inf) -> list[dict[str, Any]]:
    """Tokens with their alternatives, as the chats of Ollama and OpenAI report them."""

    def write(token: ScoredToken) -> dict[str, Any]:
        text = token.data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(token.logprob, least), "bytes": list(token.data)}

    return [{**write(each), "top_logprobs": [write(other) for other in each.top]} for each in logprobs]


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


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work. If the client disconnects first, cancels it and raises ClientDisconnect.

    If the work opened an answer in the last moment, the answer is closed.
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
        if isinstance(outcome, Answer) and not is_taken:
            outcome.close()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
