"""Errors as HTTP answers: a status, headers, and a body in the format of the API.

`to_http_error` translates exceptions to an `HttpError`; each API has a function that formats it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from bough.errors import (
    AccessDenied,
    BoughError,
    DownloadError,
    EngineError,
    ModelNotFound,
    NodeNotFound,
    PromptTooLong,
    RateLimited,
    RequestCancelled,
    RequestError,
    SettingsError,
    TooLarge,
    Unavailable,
    UnsupportedModel,
)

log = logging.getLogger(__name__)

Api = Literal["ollama", "openai", "anthropic", "bough"]

CLIENT_CLOSED_REQUEST = 499
"""The status that the log shows for a request whose client disconnected, as nginx does."""

_STATUSES: tuple[tuple[type[BoughError], int], ...] = (
    (RequestCancelled, CLIENT_CLOSED_REQUEST),
    (TooLarge, 413),
    (NodeNotFound, 404),
    (RequestError, 400),
    (SettingsError, 400),
    (ModelNotFound, 404),
    (UnsupportedModel, 400),
    (DownloadError, 502),
    (RateLimited, 429),
    (Unavailable, 503),
    (EngineError, 500),
)


MAX_TEXT_CHARACTERS = 2_000
"""Longer texts are cut: they repeat something large that a client has sent."""


@dataclass(frozen=True)
class HttpError:
    """An error answer: a status, a text for people, headers, and sometimes a code for programs."""

    status: int
    text: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT_CHARACTERS:
            object.__setattr__(self, "text", self.text[: MAX_TEXT_CHARACTERS - 1] + "…")


def _from_bough_error(error: BoughError) -> HttpError:
    """The answer for one of our own errors."""
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, AccessDenied):
        return HttpError(401 if error.needs_key else 403, str(error))
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    return HttpError(status, str(error), _code_of(error), headers)


def _code_of(error: BoughError) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "model_not_found" if isinstance(error, ModelNotFound) else None


def to_http_error(error: Exception) -> HttpError:
    """The answer for any exception. One that is not ours is a bug, and is logged with its traceback."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, BoughError):  # raised while the body was read
        return _from_bough_error(error.__cause__)
    if isinstance(error, BoughError):
        return _from_bough_error(error)
    if isinstance(error, RequestValidationError):
        return HttpError(400, describe(error))
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, str(error.detail))
    log.error("a request failed with an unexpected error", exc_info=error)
    return HttpError(500, f"{type(error).__name__}: {error}")


def describe(error: RequestValidationError) -> str:
    """What is wrong with a body, field by field, without repeating it."""
    found = error.errors()
    texts = [f"{_place(each['loc'])}: {each['msg']}" for each in found[:3]]
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return "; ".join(texts) + more


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location if part != "body") or "body"


ErrorFormat = Callable[[HttpError], dict[str, Any]]
"""Writes the body of an error in the format of one API."""

ErrorFormatOf = Callable[[str], ErrorFormat]
"""Finds the format that errors have for a path."""


def format_plain_error(http_error: HttpError) -> dict[str, Any]:
    """The body of an error in the Ollama API and in our own."""
    return {"error": http_error.text}


def api_of(path: str) -> Api:
    """The API that a path belongs to, whether or not a route has it."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path == "/v1" or path.startswith("/v1/") or path in ("/rerank", "/v2/rerank"):
        return "openai"
    if path == "/api/cache" or path.startswith("/api/cache/"):
        return "bough"
    return "ollama" if path == "/" or path == "/api" or path.startswith("/api/") else "bough"


def error_response(http_error: HttpError, format_error: ErrorFormat) -> JSONResponse:
    return JSONResponse(format_error(http_error), http_error.status, http_error.headers)


async def refuse(http_error: HttpError, error_format_of: ErrorFormatOf, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error instead of passing it on."""
    await error_response(http_error, error_format_of(scope["path"]))(scope, receive, send)
