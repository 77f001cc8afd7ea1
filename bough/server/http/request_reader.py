"""Reading requests off a connection: heads of bounded size, framed in one way only.

Uvicorn hands h11 as much as has come, and h11 bounds only what is incomplete: a head that comes at once could be as large
as what is read at once. What is refused here no layer of the application has seen.
"""

from __future__ import annotations

from typing import Any

import h11

HEADER_BYTES = 64 * 2**10


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
