"""Which API a path belongs to, and how to refuse a request in the words of that API before any route has seen it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from starlette.types import Receive, Scope, Send

from bough.server.http.errors import Fault
from bough.server.http.wire import Shape, answer_fault

Api = Literal["ollama", "openai", "anthropic", "bough"]
ShapeOf = Callable[[str], Shape]
"""The shape that errors have for a path."""

OPEN_PATHS = frozenset(("/", "/health", "/health/live", "/health/ready"))
"""What everybody may see, also without a key: that there is a server, and how it does."""


def api_of(path: str) -> Api:
    """The API that owns a path, whether or not there is anything at it."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path == "/v1" or path.startswith("/v1/"):
        return "openai"
    if path == "/api/cache" or path.startswith("/api/cache/"):
        return "bough"
    return "ollama" if path == "/" or path == "/api" or path.startswith("/api/") else "bough"


async def refuse(fault: Fault, shape_of: ShapeOf, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error instead of passing it on."""
    await answer_fault(fault, shape_of(scope["path"]))(scope, receive, send)
