"""Connections: how many there may be, and how long each waits for its client.

A connection waits for its client until it has a whole request. Each open connection takes a file descriptor, and so does
each page that the cache reads or saves. When there are too many connections, the one that has waited longest is closed, so
that idle clients block neither new clients nor the cache. A client that reads nothing for `stall_s` is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_BYTES = 64 * 2**10
_HEADER_S = 60.0
_LINGER_S = 2.0  # a refused client may still be sending, and would not read the answer if we disconnected at once
_STALL_S = 300.0
_MAX_CONNECTIONS = 8192
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_OTHER_FILES = 512  # for pages, the index, weights and downloads


class RequestReader(h11.Connection):
    """An h11 connection that refuses heads of more than `HEADER_BYTES`, and heads that give the length of a body twice.

    H11 itself bounds only incomplete heads, and uvicorn hands it all bytes that have arrived. `refusal` is the error of the
    last request, if any. The pieces of a stream are written here in half of h11's time: there is one for every token.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)
        self.refusal: h11.RemoteProtocolError | None = None
        self._is_chunked = False  # whether the answer that is being sent has no length, and goes in chunks

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # without the overloads of h11
        if self._is_chunked and isinstance(event, h11.Data) and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        output = super().send(event)
        if isinstance(event, h11.Response):
            self._is_chunked = _CHUNKED in (output or b"").lower()
        return output

    def next_event(self) -> Any:
        held_bytes = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                if held_bytes - len(self.trailing_data[0]) > HEADER_BYTES:
                    raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
                names = [name for name, _ in event.headers]
                if b"content-length" in names and b"transfer-encoding" in names:
                    raise h11.RemoteProtocolError("there are both Content-Length and Transfer-Encoding")
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event


class WaitingConnections:
    """The connections that wait for their clients, the longest first. At most `max_connections` may be open in all."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._connections: OrderedDict[Connection, None] = OrderedDict()

    def update(self, connection: Connection, *, has_progress: bool = False) -> None:
        """Note whether a connection waits. It moves to the end if more of its body has arrived."""
        if not connection.waits:
            self._connections.pop(connection, None)
        elif connection not in self._connections:
            self._connections[connection] = None
        elif has_progress:
            self._connections.move_to_end(connection)

    def make_room(self, num_open: int) -> None:
        """Close the connection that has waited longest if there are too many."""
        if num_open > self.max_connections and self._connections:
            self._connections.popitem(last=False)[0].transport.abort()

    def close_all(self) -> None:
        """Close every connection that waits: they have no request in progress."""
        for connection in list(self._connections):
            connection.transport.abort()
        self._connections.clear()


class Timer:
    """Calls a function once, some time after the first `start`, unless it is cancelled before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, after_s: float, work: Callable[[], object]) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(after_s, work)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """Uvicorn's connection, with a limit on the time that a head takes to arrive and that a client takes to read."""

    header_s = _HEADER_S
    stall_s = _STALL_S
    conn: RequestReader

    def __init__(self, *args: Any, waiting: WaitingConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = RequestReader()
        self._is_refused = False
        self._all_waiting = waiting
        self._head_timer = Timer(self.loop)
        self._stall_timer = Timer(self.loop)

    @property
    def waits(self) -> bool:
        """Whether the client still has to send a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()
        self._all_waiting.update(self)
        self._all_waiting.make_room(len(self.connections))

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:  # what a refused client still sends is discarded
            super().data_received(data)
            self._watch_head()
            self._all_waiting.update(self, has_progress=self.conn.their_state is h11.SEND_BODY)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._all_waiting.update(self)

    def send_400_response(self, msg: str) -> None:
        """Answer a wrong request, unless its answer has begun, and disconnect soon. The answer does not repeat it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        status = HTTPStatus(self.conn.refusal.error_status_hint if self.conn.refusal else HTTPStatus.BAD_REQUEST)
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            msg = f"The request's line and headers have more than {HEADER_BYTES:,} bytes, which they may have."
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=msg.encode()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        self._head_timer.cancel()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer.start(_LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all_waiting.update(self)
        self._head_timer.cancel()
        self._stall_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer.start(self.stall_s, self._disconnect)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.cancel()

    def watch_end(self) -> None:
        """Limit how long a connection that is being closed waits for its client to read."""
        if self.transport.is_closing():
            self._stall_timer.start(self.stall_s, self._disconnect)

    def _watch_head(self) -> None:
        """Start the timer of a head when none runs, and stop it when the head is complete."""
        if self._is_refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._head_timer.cancel()
        elif not self.transport.is_closing():
            self._head_timer.start(self.header_s, self.transport.close)

    def _disconnect(self) -> None:
        log.info("a client took nothing for %.0f s, and was disconnected", self.stall_s)
        self.transport.abort()


def allow_many_files() -> int:
    """Raise the limit of open files as far as the system allows; returns how many connections may take of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems report "no limit" although there is one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return connections_within(_MAX_CONNECTIONS + _OTHER_FILES if soft == resource.RLIM_INFINITY else soft)


def connections_within(num_files: int) -> int:
    """How many connections are allowed if this many files may be open. The rest is for pages, weights and downloads."""
    return max(1, min(_MAX_CONNECTIONS, max(num_files // 2, num_files - _OTHER_FILES)))
