"""The layers around the routes, one at a time, over an application that tells what reached it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.waiting import BOUND_S


class Inner:
    """Stands for the routes: answers every request with its headers, its state and the size of its body."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.state = SimpleNamespace(is_draining=False)  # as that of an application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
            message = await receive()
        state = {name: value for name, value in scope.get("state", {}).items() if name != "trace"}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        await JSONResponse({"headers": headers, "state": state, "num_bytes": len(body)})(scope, receive, send)


def in_app(layer: ASGIApp, inner: Inner) -> ASGIApp:
    """The layer as it stands in an application, which layers find in the scope."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = inner
        await layer(scope, receive, send)

    return call


def send_to(layer: ASGIApp, method: str = "GET", path: str = "/api/tags", **options: Any) -> httpx.Response:
    """The answer to one request."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(layer, client=("192.0.2.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:11435") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def call_raw(
    layer: ASGIApp,
    receive: Callable[[], Awaitable[Message]] | Iterable[Message],
    headers: Iterable[tuple[bytes, bytes]] = (),
    path: str = "/api/chat",
    http_version: str = "1.1",
) -> list[Message]:
    """What a layer sends when these messages come: for clients that no library can play."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    if not callable(receive):
        left = iter(receive)

        async def receive() -> Message:
            found = next(left, None)
            return found if found is not None else await asyncio.Event().wait()  # type: ignore[return-value]

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": http_version,
        "headers": list(headers),
        "client": ("192.0.2.7", 1234),
    }
    asyncio.run(asyncio.wait_for(layer(scope, receive, send), BOUND_S))
    return sent
