"""One connection of a client: heads of requests that are bounded in time and size, and framed in one way only.

Uvicorn hands h11 as much as has come, and h11 bounds only what is incomplete: a head that comes at once could be as large
as what is read at once. What is refused here no layer of the application has seen.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 64 * 2**10
_HEADER_S = 60.0
_LINGER_S = 2.0  # a refused client may still be sending, and would not see why if it were hung up on at once


class RequestReader(h11.Connection):
    """H11's, but no head is larger than `HEADER_BYTES`, however it comes, and none tells the length of its body twice.

    `refusal` is what was wrong with the last request, if something was.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)
        self.refusal: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        try:
            return self._next_checked()
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise

    def _next_checked(self) -> Any:
        held_bytes = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request):
            if held_bytes - len(self.trailing_data[0]) > HEADER_BYTES:
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
            names = [name for name, _ in event.headers]
            if b"content-length" in names and b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("there are both Content-Length and Transfer-Encoding")
        return event


class Connection(H11Protocol):
    """Uvicorn's, but who sends no whole head of a request in time is hung up on, at first as well as later."""

    header_s = _HEADER_S
    conn: RequestReader
    _waiting: asyncio.TimerHandle | None = None
    _is_refused = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = RequestReader()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Tell the client what is wrong with its request, and hang up soon. Nothing of the request is repeated."""
        status, text = self._describe_refusal(msg)
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=text.encode()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def _describe_refusal(self, text: str) -> tuple[HTTPStatus, str]:
        refusal = self.conn.refusal
        if refusal is None:
            return HTTPStatus.BAD_REQUEST, text
        status = HTTPStatus(refusal.error_status_hint)
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            return status, f"The request's line and headers have more than {HEADER_BYTES:,} bytes, which they may have."
        return status, text

    def _linger(self) -> None:
        """Send no more, and read what still comes for a moment without looking at it."""
        self._is_refused = True
        self._forget_head()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._waiting = self.loop.call_later(_LINGER_S, self.transport.close)

    def _watch_head(self) -> None:
        """Begin to wait for a head, and end when it is there; each piece of one does not begin anew."""
        if self._is_refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self.header_s, self.transport.close)

    def _forget_head(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
