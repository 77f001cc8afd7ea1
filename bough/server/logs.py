"""A line for each request, and the trace that it belongs to.

This is the outermost middleware. It counts every request, writes a line for it, and adds a request id and the trace of the
W3C (`traceparent`) to its answer. A line never has prompts, answers, keys or query strings; only the reason of an error may
quote the beginning of a wrong value.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.server.http.errors import CLIENT_CLOSED_REQUEST, ErrorSlot, current_error
from bough.server.http.json_routes import api_of
from bough.server.http.security import OPEN_PATHS, PAGE_PATH
from bough.server.serving.loaded.progress import RecordSlot, RequestRecord, current_slot
from bough.server.serving.metrics import Metrics

log = logging.getLogger("bough.requests")

LOG_FILE_BYTES, NUM_OLD_FILES = 5 * 10**6, 2
_PATH_BYTES = 500
_REASON_CHARACTERS = 300
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
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
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": path[:_PATH_BYTES].decode("ascii", "backslashreplace"),
        "status": trace.status,
        **(_describe_record(trace.slot.record) if trace.slot.record else {}),
        "total_s": round(total_s, 4),
        "client": client[0] if client else "",
        "key": scope.get("state", {}).get("key_name", ""),
        "trace_id": trace.trace_id,
        "request_id": trace.request_id,
        "note": "" if trace.is_whole else "the client hung up",
        "reason": trace.error.text[:_REASON_CHARACTERS],
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


class LineFormatter(logging.Formatter):
    """Each record as a line for people: time (on a terminal without the date), level of warnings and errors, text."""

    def __init__(self, *, is_terminal: bool, has_colours: bool) -> None:
        super().__init__(datefmt="%H:%M:%S" if is_terminal else "%Y-%m-%d %H:%M:%S")
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{level}{record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        status, colour = getattr(record, "fields", {}).get("status", 0), ""
        if self._has_colours and (record.levelno >= logging.WARNING or status >= 400):
            colour = _RED if record.levelno >= logging.ERROR or status >= 500 else _YELLOW
        return f"{self.formatTime(record, self.datefmt)} {colour}{text}{_PLAIN if colour else ''}"


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the present standard error, which a progress bar replaces while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class JsonFormatter(logging.Formatter):
    """Each record as a JSON object on a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = fields | {"error": self.formatException(record.exc_info)}
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": at, "level": record.levelname.lower(), "logger": record.name, **fields})


def set_up_logs(*, as_json: bool, is_terminal: bool = False, has_colours: bool = False) -> None:
    """Send what Bough logs to the standard error, as lines for people or as JSON. For a process that is a server."""
    handler = _StandardError()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(is_terminal=is_terminal, has_colours=has_colours))
    logger = logging.getLogger("bough")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def writing_log_file(file: Path, *, as_json: bool) -> Iterator[None]:
    """Write what Bough logs to a file, too, which its owner alone can read. A thread writes, in case the disk hangs.

    A full file becomes `FILE.1`, and so on; the oldest is deleted. Raises OSError if the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = _PrivateFile(file, maxBytes=LOG_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
    output.setFormatter(JsonFormatter() if as_json else LineFormatter(is_terminal=False, has_colours=False))
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    listener, handler, logger = QueueListener(records, output), QueueHandler(records), logging.getLogger("bough")
    logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        listener.stop()  # writes what is left
        output.close()


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
