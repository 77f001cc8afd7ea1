"""Limits on requests: the size of bodies, the time that they take to arrive, and the number of requests per minute.

The whole body is read before a route sees the request. Its content type is set to JSON, because many clients of Ollama send
none, or that of a form. The body of an import is streamed instead, and its route counts the bytes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.config import Settings
from bough.errors import BoughError, RateLimited, ShuttingDown
from bough.server.http.errors import ErrorFormatOf, refuse, to_http_error
from bough.server.http.security import OPEN_PATHS

BODY_S = 60.0
MOST_BODIES = 32  # bodies of the largest size that may be arriving at the same time

IMPORT_PATH = "/api/cache/import"
_DRAIN_S = 5.0
_MAX_CLIENTS = 10_000
_UNLIMITED_PATHS = OPEN_PATHS | {"/metrics"}
_METHODS_WITH_BODY = frozenset(("POST", "PUT", "PATCH", "DELETE"))


class RateLimit:
    """A limit of requests per minute for each client. A client may send the unused requests of the last minute at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, at which time; oldest first

    def take(self, client_id: str) -> None:
        """Count a request. Raises RateLimited if it is one too many."""
        if not self._per_minute:
            return
        now = self._clock()
        num_left, at_s = self._buckets.pop(client_id, (self._per_minute, now))
        num_left = min(self._per_minute, num_left + (now - at_s) * self._per_minute / 60)
        self._buckets[client_id] = (num_left - 1 if num_left >= 1 else num_left, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if num_left < 1:
            wait_s = (1 - num_left) * 60 / self._per_minute
            text = f"more than {self._per_minute} requests a minute; the next may come in {wait_s:.1f} s"
            raise RateLimited(text, wait_s)


class LimitsMiddleware:
    """Refuses requests that exceed a limit."""

    def __init__(self, app: ASGIApp, settings: Settings, error_format_of: ErrorFormatOf, body_s: float = BODY_S) -> None:
        self._app = app
        self._settings = settings
        self._error_format_of = error_format_of
        self._body_s = body_s
        self._rate = RateLimit(settings.rate_limit)
        self._coming_bytes = 0  # of all bodies that are not whole yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            if scope["path"] not in _UNLIMITED_PATHS:
                if scope["method"] in _METHODS_WITH_BODY and getattr(scope["app"].state, "is_draining", False):
                    raise ShuttingDown("the server is shutting down and refuses new requests")
                self._rate.take(scope.get("state", {}).get("client_id", ""))
            receive = await self._bound_body(scope, receive)
        except ClientDisconnect:
            return None
        except (BoughError, HTTPException) as error:
            return await refuse(to_http_error(error), self._error_format_of, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _bound_body(self, scope: Scope, receive: Receive) -> Receive:
        """The `receive` from which the route reads the body. Raises HTTPException for a body that exceeds a limit."""
        if scope["method"] not in _METHODS_WITH_BODY:
            return receive
        if scope["path"] == IMPORT_PATH:  # it goes to a file, and is bounded by the free space on disk
            return _limit_pauses(receive, self._body_s)
        limit = self._settings.max_body
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await self._drain(receive, limit)
            raise _too_large(int(declared[:20]), limit)
        scope["headers"] = list(scope["headers"])
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        return _give_body(await self._read(receive, limit), receive)

    async def _read(self, receive: Receive, limit: int) -> bytes:
        """Read a whole body. All bodies that are arriving share one limit, because each of them takes memory."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += (piece := message.get("body", b""))
                    self._coming_bytes += len(piece)
                    if len(body) > limit:
                        break
                    if not message.get("more_body", False):
                        return bytes(body)
                    if self._coming_bytes > MOST_BODIES * limit:
                        found = f"{self._coming_bytes:,} bytes of bodies are coming at the same time"
                        text = f"{found}, and there may be {MOST_BODIES * limit:,}; try again soon"
                        raise HTTPException(503, text, {"Connection": "close", "Retry-After": "1"})
        except TimeoutError:
            text = f"after {math.ceil(self._body_s)} s only {len(body):,} bytes of the body had come"
            raise HTTPException(408, text, {"Connection": "close"}) from None
        finally:
            self._coming_bytes -= len(body)
        size = len(body)
        body.clear()
        await self._drain(receive, limit)
        raise _too_large(size, limit)

    async def _drain(self, receive: Receive, limit: int) -> None:
        """Read more of the body and discard it: a client sees the answer only when it has stopped sending."""
        left = 4 * limit + 2**20
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_DRAIN_S, self._body_s)):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return


def _too_large(size: int, limit: int) -> HTTPException:
    text = f"the body has {size:,} bytes or more, and may have {limit:,}"
    return HTTPException(413, text, {"Connection": "close"})


def _give_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then the messages of the connection."""
    left = [body]

    async def receive_body() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return receive_body


def _limit_pauses(receive: Receive, piece_s: float) -> Receive:
    """A `receive` for a long body. A client that sends nothing for `piece_s` counts as disconnected."""
    is_whole = False

    async def receive_piece() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout(piece_s):
                message = await receive()
        except TimeoutError:
            message = {"type": "http.disconnect"}
        is_whole = not message.get("more_body", False)
        return message

    return receive_piece
