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
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.config import Settings
from bough.errors import RateLimited, ShuttingDown
from bough.server.http.errors import ErrorFormatOf, HttpError, refuse, to_http_error
from bough.server.http.security import OPEN_PATHS

BODY_S = 60.0
MOST_BODIES = 32
"""How many bodies of the largest size may be arriving at the same time."""

IMPORT_PATH = "/api/cache/import"
_DRAIN_S = 5.0
_MAX_CLIENTS = 10_000
_UNLIMITED_PATHS = OPEN_PATHS | {"/metrics"}
_METHODS_WITH_BODY = frozenset(("POST", "PUT", "PATCH", "DELETE"))


@dataclass
class Bucket:
    """A token bucket: how many requests a client may send now, and when that was computed."""

    tokens: float
    at_s: float


class RateLimit:
    """A limit of requests per minute for each client. A client may send the unused requests of the last minute at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # least recently seen first

    def take(self, client_id: str) -> None:
        """Count a request. Raises RateLimited if it is one too many."""
        if not self._per_minute:
            return
        now = self._clock()
        bucket = self._buckets.pop(client_id, None) or Bucket(self._per_minute, now)
        self._buckets[client_id] = bucket
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        bucket.tokens = min(self._per_minute, bucket.tokens + (now - bucket.at_s) * self._per_minute / 60)
        bucket.at_s = now
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * 60 / self._per_minute
            raise RateLimited(
                f"more than {self._per_minute} requests a minute; the next may come in {wait_s:.1f} s", wait_s
            )
        bucket.tokens -= 1


class BodyRefused(Exception):
    """The body is too large, came too slowly, or not at all."""

    def __init__(self, http_error: HttpError | None) -> None:
        super().__init__(http_error.text if http_error else "the client disconnected")
        self.http_error = http_error


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
            self._check(scope)
            receive = await self._bounded(scope, receive)
        except (RateLimited, ShuttingDown) as error:
            return await refuse(to_http_error(error), self._error_format_of, scope, receive, send)
        except BodyRefused as refused:
            if refused.http_error is None:
                return None
            return await refuse(refused.http_error, self._error_format_of, scope, receive, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["path"] in _UNLIMITED_PATHS:
            return
        if scope["method"] in _METHODS_WITH_BODY and getattr(scope["app"].state, "is_draining", False):
            raise ShuttingDown("the server is shutting down and refuses new requests")
        self._rate.take(scope.get("state", {}).get("client_id", ""))

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The `receive` from which the route reads the body."""
        if scope["method"] not in _METHODS_WITH_BODY:
            return receive
        if scope["path"] == IMPORT_PATH:  # it goes to a file, and is bounded by the free space on disk
            return _TimedBody(receive, self._body_s)
        limit = self._settings.max_body
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            await self._drain(receive, limit)
            raise BodyRefused(too_large(int(declared[:20]), limit))
        scope["headers"] = list(scope["headers"])
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        return _BufferedBody(await self._read(receive, limit), receive)

    async def _read(self, receive: Receive, limit: int) -> bytes:
        """Read a whole body. All bodies that are arriving share one limit, because each of them takes memory."""
        body = bytearray()
        try:
            return await self._read_into(body, receive, limit)
        finally:
            self._coming_bytes -= len(body)

    async def _read_into(self, body: bytearray, receive: Receive, limit: int) -> bytes:
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise BodyRefused(None)
                    body += (piece := message.get("body", b""))
                    self._coming_bytes += len(piece)
                    if len(body) > limit:
                        break
                    if not message.get("more_body", False):
                        return bytes(body)
                    if self._coming_bytes > MOST_BODIES * limit:
                        raise BodyRefused(too_many(self._coming_bytes, MOST_BODIES * limit))
        except TimeoutError:
            raise BodyRefused(too_slow(self._body_s, len(body))) from None
        size = len(body)
        self._coming_bytes -= size
        body.clear()
        await self._drain(receive, limit)
        raise BodyRefused(too_large(size, limit))

    async def _drain(self, receive: Receive, limit: int) -> None:
        """Read more of the body and discard it: a client sees the answer only when it has stopped sending."""
        left = 4 * limit + 2**20
        try:
            async with asyncio.timeout(min(_DRAIN_S, self._body_s)):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


def too_large(size: int, limit: int) -> HttpError:
    return HttpError(413, f"the body has {size:,} bytes or more, and may have {limit:,}", headers={"Connection": "close"})


def too_slow(seconds: float, size: int) -> HttpError:
    text = f"after {math.ceil(seconds)} s only {size:,} bytes of the body had come"
    return HttpError(408, text, headers={"Connection": "close"})


def too_many(size: int, limit: int) -> HttpError:
    text = f"{size:,} bytes of bodies are coming at the same time, and there may be {limit:,}; try again soon"
    return HttpError(503, text, headers={"Connection": "close", "Retry-After": "1"})


class _BufferedBody:
    """A `receive` that gives a body that was read already, and then the messages of the connection."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _TimedBody:
    """A `receive` for a long body. A client that sends nothing for `piece_s` counts as disconnected."""

    def __init__(self, receive: Receive, piece_s: float) -> None:
        self._receive = receive
        self._piece_s = piece_s
        self._is_done = False

    async def __call__(self) -> Message:
        if self._is_done:
            return await self._receive()
        try:
            async with asyncio.timeout(self._piece_s):
                message = await self._receive()
        except TimeoutError:
            message = {"type": "http.disconnect"}
        self._is_done = not message.get("more_body", False)
        return message
