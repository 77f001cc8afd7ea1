"""A client of `/api/events` on a running server, which reads on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.server.watched import Watched

WAIT_S = 30.0


class EventStream:
    """What was read so far. `is_over` says that the server has ended the stream."""

    def __init__(self) -> None:
        self.watched = Watched()
        self.is_over = False
        self._changes = threading.Condition()

    def read(self, response: httpx.Response) -> None:
        event = ""
        with contextlib.suppress(httpx.TransportError):  # the test has closed it
            for line in _lines(response):
                with self._changes:
                    if line.startswith("event: "):
                        event = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        self.watched.apply(event, line.removeprefix("data: "))
                    self._changes.notify_all()
            with self._changes:
                self.is_over = True
                self._changes.notify_all()

    def wait_until(self, is_so: Callable[[Watched], object]) -> Watched:
        """Wait until the events say so."""
        self._wait(lambda: is_so(self.watched), self.watched)
        return self.watched

    def wait_until_over(self) -> None:
        self._wait(lambda: self.is_over, self.watched)

    def _wait(self, is_so: Callable[[], object], seen: object) -> None:
        deadline_s = time.monotonic() + WAIT_S
        with self._changes:
            while not is_so():
                assert self._changes.wait(deadline_s - time.monotonic()), f"it did not happen within {WAIT_S} s: {seen}"


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines as the format has them: httpx would also end one at U+2028."""
    rest = b""
    for piece in response.iter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


@contextmanager
def watching(client: httpx.Client, **params: Any) -> Iterator[EventStream]:
    """Read events as long as the context lasts."""
    with client.stream("GET", "/api/events", params={"interval": 0.1} | params, timeout=None) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = EventStream()
        thread = threading.Thread(target=stream.read, args=(response,))
        thread.start()
        try:
            yield stream
        finally:
            with contextlib.suppress(OSError):
                response.extensions["network_stream"].get_extra_info("socket").shutdown(2)
            thread.join(WAIT_S)
            assert not thread.is_alive()
