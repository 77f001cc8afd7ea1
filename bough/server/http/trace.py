"""The trace that a request belongs to, after the W3C's trace context, and what the log says of it."""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from bough.server.http.errors import CLIENT_GONE
from bough.server.serving.record import RecordSlot

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass
class Trace:
    """One request on its way through the server. The service fills `slot` with the record of its answer."""

    trace_id: str
    span_id: str
    flags: str
    request_id: str
    state: str = ""  # what other systems want carried along, as it came
    status: int = CLIENT_GONE  # until an answer begins
    is_whole: bool = False
    slot: RecordSlot = field(default_factory=RecordSlot)
    started: float = field(default_factory=time.perf_counter)

    @property
    def parent(self) -> str:
        """The header by which the client's tracing finds this request."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


current_trace: ContextVar[Trace | None] = ContextVar("bough_trace", default=None)
"""The request that the running task serves."""


def read_trace(headers: Headers) -> Trace:
    """The trace that a request belongs to: the one it names, or a new one. What is no valid trace is ignored."""
    given = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    is_other_form = given is not None and given[0].startswith("00") and given[3]
    known = None if given is None or is_other_form else given
    span_id = secrets.token_hex(8)
    request_id = headers.get("x-request-id", "")
    return Trace(
        trace_id=known[1] if known else secrets.token_hex(16),
        span_id=span_id,
        flags=known[2] if known else "01",
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else f"req_{span_id}",
        state=headers.get("tracestate", "")[:512] if known else "",
    )
