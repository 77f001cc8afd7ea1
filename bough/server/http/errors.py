"""What went wrong, as HTTP says it: a status and headers. Each API writes the body in its own shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bough.errors import (
    AccessDenied,
    BoughError,
    DownloadError,
    EngineError,
    ModelNotFound,
    PromptTooLong,
    RateLimited,
    RequestCancelled,
    RequestError,
    SettingsError,
    TooLarge,
    Unavailable,
    UnsupportedModel,
)

CLIENT_GONE = 499
"""The status of a request whose client hung up: nobody sees it but the log."""

_STATUSES: tuple[tuple[type[BoughError], int], ...] = (
    (RequestCancelled, CLIENT_GONE),
    (TooLarge, 413),
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
"""Texts that are longer are cut: they repeat something large that a client has sent."""


@dataclass(frozen=True)
class Fault:
    """A status, a text for people, headers, and a code for programs where there is one."""

    status: int
    text: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT_CHARACTERS:
            object.__setattr__(self, "text", self.text[: MAX_TEXT_CHARACTERS - 1] + "…")


def fault_of(error: BoughError) -> Fault:
    """How to answer a request that failed by one of our own errors."""
    headers = {}
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, AccessDenied):
        return Fault(401 if error.needs_key else 403, str(error))
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    return Fault(status, str(error), _code_of(error), headers)


def _code_of(error: BoughError) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "model_not_found" if isinstance(error, ModelNotFound) else None
