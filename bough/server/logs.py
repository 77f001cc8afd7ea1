"""A line for each request, and the trace that it belongs to.

This is the outermost middleware. It counts every request, writes a line for it, and adds a request id and the trace of the
W3C (`traceparent`) to its answer. A line never has prompts, answers, keys or query strings; only the reason of an error may
quote the beginning of a wrong value.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.server.http.errors import CLIENT_CLOSED_REQUEST, ErrorSlot, current_error
from bough.server.http.json_routes import api_of
from bough.server.http.security import OPEN_PATHS, PAGE_PATH
from bough.server.serving.loaded.progress import RecordSlot, RequestRecord, current_slot
from bough.server.serving.metrics import Metrics

log = logging.getLogger("bough.requests")

_PATH_BYTES = 500
_REASON_CHARACTERS = 300
_PROBED_PATHS = OPEN_PATHS | {"/metrics"}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass
class RequestTrace:
    """One request on its way through the server. The service fills `slot` with the record of its answer."""

    trace_id: str
    parent: str  # the `traceparent` header of the answer
    request_id: str
    state: str = ""  # the `tracestate` header, passed on as it came
    status: int = CLIENT_CLOSED_REQUEST  # until an answer begins
    is_whole: bool = False
    slot: RecordSlot = field(default_factory=RecordSlot)
    error: ErrorSlot = field(default_factory=ErrorSlot)
    started: float = field(default_factory=time.perf_counter)


current_trace: ContextVar[RequestTrace | None] = ContextVar("bough_trace", default=None)  # of the running task's request


def read_trace(headers: Headers) -> RequestTrace:
    """The trace that a request belongs to: the one in its headers, or a new one if they have no valid trace."""
    known = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if known is not None and known[0].startswith("00") and known[3]:  # only later versions may have more parts
        known = None
    span_id = secrets.token_hex(8)
    request_id = headers.get("x-request-id", "")
    trace_id, flags = (known[1], known[2]) if known else (secrets.token_hex(16), "01")
    return RequestTrace(
        trace_id,
        parent=f"00-{trace_id}-{span_id}-{flags}",
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else f"req_{span_id}",
        state=headers.get("tracestate", "")[:512] if known else "",
    )


class LogsMiddleware:
    """Logs and counts every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        trace = read_trace(Headers(scope=scope))
        trace.slot.request_id = trace.request_id
        scope.setdefault("state", {})["trace"] = trace
        tokens = current_trace.set(trace), current_slot.set(trace.slot), current_error.set(trace.error)
        self._metrics.http_began()
        try:
            await self._app(scope, receive, _add_trace(send, trace))
        except BaseException:
            trace.status = 500 if trace.status == CLIENT_CLOSED_REQUEST else trace.status
            raise
        finally:
            current_trace.reset(tokens[0])
            current_slot.reset(tokens[1])
            current_error.reset(tokens[2])
            self._finish(scope, trace)
        return None

    def _finish(self, scope: Scope, trace: RequestTrace) -> None:
        record = trace.slot.record
        model = record.model if record and record.usage else ""
        self._metrics.http_ended(api_of(scope["path"]), model, trace.status)
        fields = _describe(scope, trace, time.perf_counter() - trace.started)
        is_quiet = scope["path"] in _PROBED_PATHS or scope["path"].startswith(f"{PAGE_PATH}/")
        level = logging.DEBUG if is_quiet else logging.INFO  # probes come every few seconds, and a page has many files
        log.log(level, _to_line(fields), extra={"fields": fields})


def _add_trace(send: Send, trace: RequestTrace) -> Send:
    """A `send` that adds the headers of the trace to an answer, and notes its status."""

    async def send_with_trace(message: Message) -> None:
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["traceparent"] = trace.parent
            headers["x-request-id"] = headers["request-id"] = trace.request_id
            if trace.state:
                headers["tracestate"] = trace.state
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            trace.is_whole = True

    return send_with_trace


def _describe(scope: Scope, trace: RequestTrace, total_s: float) -> dict[str, Any]:
    """The fields of a request's line. Unknown ones are left out."""
    client = scope.get("client")
    path: bytes = scope.get("raw_path", scope["path"].encode()).partition(b"?")[0]
    record = trace.slot.record
    reason = trace.error.text or (record.error if record else None) or ""  # the second ends a stream that has begun
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": path[:_PATH_BYTES].decode("ascii", "backslashreplace"),
        "status": trace.status,
        **(_describe_record(record) if record else {}),
        "total_s": round(total_s, 4),
        "client": client[0] if client else "",
        "key": scope.get("state", {}).get("key_name", ""),
        "trace_id": trace.trace_id,
        "request_id": trace.request_id,
        "note": "" if trace.is_whole else "the client hung up",
        "reason": reason[:_REASON_CHARACTERS],
    }
    return {name: value for name, value in fields.items() if value != ""}


def _describe_record(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": record.model[:200]}
    if record.usage is not None:
        fields |= {
            "prompt_tokens": record.usage.prompt_tokens,
            "cached_tokens": record.usage.cached_tokens,
            "computed_tokens": record.usage.computed_tokens,
            "completion_tokens": record.completion_tokens,
        }
    counts = {"texts": record.num_texts, "disk_bytes": record.disk_bytes, "store_bytes": record.store_bytes}
    counts["recomputed_tokens"] = record.recomputed_tokens
    fields |= {name: number for name, number in counts.items() if number}
    if record.left_out.num_messages:
        fields["messages_left_out"] = record.left_out.num_messages
    if record.left_out.is_text_cut:
        fields["text_cut"] = True
    if not record.num_texts:
        fields |= {"queue_s": round(record.queue_s, 4), "first_token_s": round(record.first_token_s, 4)}
    return fields


def _to_line(fields: dict[str, Any]) -> str:
    """The fields as a short line for people: method, path, status, duration, tokens, notes; JSON has them all."""
    total_s = fields["total_s"]
    duration = f"{1000 * total_s:.0f}ms" if total_s < 1 else f"{total_s:.1f}s"
    parts = [fields["method"], fields["path"], str(fields["status"]), duration]
    if "texts" in fields:
        parts.append(f"{fields['texts']} texts, {fields['prompt_tokens']} tokens, {fields['cached_tokens']} cached")
    elif "prompt_tokens" in fields:
        tokens = f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens"
        parts.append(f"{tokens}, {fields['cached_tokens']} cached")
    if fields["status"] >= 500:
        parts.append(fields["request_id"])
    notes = [f"{fields['messages_left_out']} messages left out"] if "messages_left_out" in fields else []
    notes += ["text cut"] if "text_cut" in fields else []
    notes += [fields[name] for name in ("key", "note") if name in fields]
    text = " ".join(parts) + "".join(f" ({note})" for note in notes)
    if "reason" in fields:
        text += f": {fields['reason']}"
    return text if text.isprintable() else ascii(text)[1:-1]
