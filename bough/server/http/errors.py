"""Errors as HTTP answers: a status, headers, and a body in the format of the API.

`to_http_error` translates exceptions to an `HttpError`; each API has a function that formats it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from bough import errors

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # the status in the log of a request whose client disconnected, as in nginx's

_STATUSES: tuple[tuple[type[errors.BoughError], int, str | None], ...] = (  # with a code for programs
    (errors.RequestCancelled, CLIENT_CLOSED_REQUEST, None),
    (errors.TooLarge, 413, None),
    (errors.NodeNotFound, 404, None),
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.RequestError, 400, None),
    (errors.SettingsError, 400, None),
    (errors.ModelNotFound, 404, "model_not_found"),
    (errors.UnsupportedModel, 400, None),
    (errors.DownloadError, 502, None),
    (errors.RateLimited, 429, None),
    (errors.Unavailable, 503, None),
    (errors.BoughError, 500, None),
)
MAX_TEXT_CHARACTERS = 2_000  # of an error; longer texts repeat something large that a client has sent


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


def to_http_error(error: Exception) -> HttpError:
    """The answer for any exception. One that is not ours is a bug, and is logged with its traceback."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, errors.BoughError):  # of a body
        error = error.__cause__
    if isinstance(error, errors.AccessDenied):
        challenge = HttpError(401, str(error), "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        return challenge if error.needs_key else HttpError(403, str(error))
    if isinstance(error, errors.BoughError):
        status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, errors.Unavailable) else {}
        return HttpError(status, str(error), code, headers)
    if isinstance(error, RequestValidationError):
        return HttpError(400, _describe_fields(error))
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    log.error("a request failed with an unexpected error", exc_info=error)
    return HttpError(500, f"{type(error).__name__}: {error}")


def _describe_fields(error: RequestValidationError) -> str:
    """What is wrong with a body, field by field, without repeating it."""
    found = error.errors()
    places = [".".join(str(part) for part in each["loc"] if part != "body") or "body" for each in found[:3]]
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, found, strict=False)) + more


@dataclass
class ErrorSlot:
    """The text of the error that one request is answered with, for its line in the log; "" if it is none."""

    text: str = ""


current_error: ContextVar[ErrorSlot | None] = ContextVar("bough_error", default=None)  # of the running task's request

ErrorFormat = Callable[[HttpError], dict[str, Any]]  # writes the body of an error in the format of one API
ErrorFormatOf = Callable[[str], ErrorFormat]  # the format of errors for a path


def format_plain_error(http_error: HttpError) -> dict[str, Any]:
    """The body of an error in the Ollama API and in our own."""
    return {"error": http_error.text}


def error_response(http_error: HttpError, format_error: ErrorFormat) -> JSONResponse:
    """The answer for an error, whose text becomes part of the request's line in the log."""
    slot = current_error.get()
    if slot is not None:
        slot.text = http_error.text
    return JSONResponse(format_error(http_error), http_error.status, http_error.headers)


async def refuse(http_error: HttpError, error_format_of: ErrorFormatOf, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error instead of passing it on."""
    await error_response(http_error, error_format_of(scope["path"]))(scope, receive, send)
