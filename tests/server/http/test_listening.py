"""The server as a process: its address, its signals and its end. The service behind it is a stand-in; all else is real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from bough.config import Settings
from bough.errors import ModelNotFound, SettingsError
from bough.server.http.connections import Connection
from bough.server.http.listening import HttpServer, bind, host, is_loopback, url_of
from tests.gates import Gate, Notes, pass_time
from tests.waiting import BOUND_S, wait_until


class FakeService:
    """Loads at once, unless told to wait or to fail."""

    def __init__(self, settings: Settings, error: Exception | None = None, waits: bool = False) -> None:
        self.settings = settings
        self.num_closed = 0
        self.loop: asyncio.AbstractEventLoop | None = None  # of the server
        self.on_drain: Callable[[], None] = lambda: None
        self.is_still_loading = False
        self.on_close: Callable[[], None] = lambda: None
        self._error = error
        self._waits = waits

    async def load(self, model: str) -> float:
        self.loop = asyncio.get_running_loop()
        if self._error:
            raise self._error
        if self._waits:
            await asyncio.Event().wait()
        return 0.0

    def drain(self) -> None:
        self.on_drain()

    async def close(self) -> None:
        self.num_closed += 1
        self.on_close()


class Place:
    """An application with one stream, served from the main thread; what a client does comes from another."""

    def __init__(self, **options: Any) -> None:
        self.settings = Settings(port=0, stop_after=options.pop("stop_s", 20.0))
        self.service = FakeService(self.settings, **options)
        self.app = FastAPI()
        self.is_ready = threading.Event()
        self.may_end = Gate()
        self.is_reading = Gate()  # the body of a request
        self.stops: Notes[None] = Notes()  # signals that the server has handled
        self.bound = bind("127.0.0.1", 0)
        self.url = url_of(self.bound)
        self.app.add_api_route("/stream", self._stream)
        self.app.add_api_route("/state", self._state)

    async def read_body(self, request: Request) -> None:
        self.is_reading.open()
        with contextlib.suppress(ClientDisconnect):
            await request.body()

    async def _state(self) -> dict[str, bool]:
        return {name: getattr(self.app.state, name, False) for name in ("is_starting", "is_draining")}

    async def _stream(self) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            yield "begun\n"
            await self.may_end.passed()
            yield "ended\n"

        return StreamingResponse(pieces())

    def serve(self, client: Callable[[], None]) -> list[BaseException]:
        """Serve while the client does its part, and until a signal ends it; returns what the client ran into."""
        errors: list[BaseException] = []

        def run_client() -> None:
            try:
                client()
            except BaseException as error:
                errors.append(error)
                self.may_end.open()
                self.signal()

        def stop(server: HttpServer, stop: Callable[[HttpServer], None] = HttpServer.stop) -> None:
            stop(server)
            self.stops.append(None)

        thread = threading.Thread(target=run_client)
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # a client that fails late must not end the tests
        with mock.patch.object(HttpServer, "stop", stop):
            thread.start()
            try:
                host(self.app, self.settings, self.service, self.bound, self.is_ready.set)
            finally:
                thread.join(BOUND_S)
                signal.signal(signal.SIGTERM, before)
        return errors

    def signal(self, times: int = 1) -> None:
        """Tell the server to end, so many times; each has been handled before the next."""
        for _ in range(times):
            num_stops = len(self.stops)
            os.kill(os.getpid(), signal.SIGTERM)
            self.stops.wait_until(lambda num_stops=num_stops: len(self.stops) > num_stops)

    def pass_time(self, seconds: float) -> None:
        """Let the clock of the server's event loop go on at once, and wait until it has seen that."""
        self.hasten(seconds)
        self.state()

    def hasten(self, seconds: float) -> None:
        """Let the clock of the server's event loop go on at once."""
        assert self.service.loop is not None
        pass_time(seconds, self.service.loop)

    def state(self) -> dict[str, bool]:
        state: dict[str, bool] = httpx.get(f"{self.url}/state", timeout=BOUND_S).json()
        return state

    def wait_until_it_listens(self) -> dict[str, bool]:
        states: list[dict[str, bool]] = []

        def listens() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                states.append(self.state())
            return bool(states)

        wait_until(listens)
        return states[0]

    def lines(self) -> Iterator[str]:
        with httpx.stream("GET", f"{self.url}/stream", timeout=BOUND_S) as response:
            yield from response.iter_lines()


def test_one_signal_lets_streams_end_and_the_service_is_closed():
    place, seen = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        seen.append(next(lines))
        place.signal()
        seen.append(place.state()["is_draining"])  # still answers
        place.may_end.open()
        seen.extend(lines)

    assert place.serve(client) == []
    assert seen == ["begun", True, "ended"]
    assert place.service.num_closed > 0


def test_the_service_ends_its_endless_streams_at_the_first_signal_and_all_that_wait_see_their_end():
    place, seen = Place(stop_s=60), []
    place.service.on_drain = place.may_end.open

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        seen.append(next(lines))
        place.signal()
        seen.extend(lines)

    assert place.serve(client) == []
    assert seen == ["begun", "ended"]


def test_a_second_signal_ends_at_once_and_the_service_is_closed():
    place = Place()

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        next(lines)
        place.signal(2)
        with pytest.raises(httpx.HTTPError):
            list(lines)

    assert place.serve(client) == []
    assert place.service.num_closed > 0


def test_streams_get_no_longer_than_the_setting_says():
    place = Place(stop_s=0.2)

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        next(lines)
        place.signal()
        with ThreadPoolExecutor(1) as reader, pytest.raises(httpx.HTTPError):
            reading = reader.submit(list, lines)
            with contextlib.suppress(RuntimeError):  # its loop is closed when the server has ended
                wait_until(lambda: place.hasten(1.0) or reading.done())  # until it is disconnected
            reading.result()

    assert place.serve(client) == []
    assert place.service.num_closed > 0


def test_streams_that_had_their_time_may_still_say_why_they_end():
    place, seen = Place(stop_s=0.2), []
    place.service.on_close = place.may_end.open

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        next(lines)
        place.signal()
        seen.extend(lines)

    assert place.serve(client) == []
    assert seen == ["ended"]


def test_it_answers_while_the_model_loads_and_a_signal_ends_it_then_too():
    place, seen = Place(waits=True), []

    def client() -> None:
        seen.append(place.wait_until_it_listens())
        place.signal()

    assert place.serve(client) == []
    assert seen == [{"is_starting": True, "is_draining": False}]
    assert not place.is_ready.is_set()
    assert place.service.num_closed > 0


def test_a_load_that_cannot_be_stopped_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch):
    place, codes = Place(waits=True), []
    place.service.is_still_loading = True
    monkeypatch.setattr("bough.server.http.listening.os._exit", codes.append)
    monkeypatch.setattr("bough.server.http.listening.logging.shutdown", lambda: None)

    def client() -> None:
        place.wait_until_it_listens()
        place.signal()

    assert place.serve(client) == []
    assert codes == [0]
    assert place.service.num_closed > 0


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error():
    place = Place(error=ModelNotFound("no model"))

    with pytest.raises(ModelNotFound, match="no model"):
        place.serve(lambda: None)
    assert place.service.num_closed > 0


def test_signals_are_given_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    place = Place()

    place.serve(lambda: place.signal() if place.is_ready.wait(BOUND_S) else None)

    assert signal.getsignal(signal.SIGTERM) is before


def test_threads_take_turns_more_often_while_it_serves():
    place, before_s, seen = Place(), sys.getswitchinterval(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        seen.append(sys.getswitchinterval())
        place.signal()

    assert place.serve(client) == []
    assert seen[0] < before_s == sys.getswitchinterval()


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} at 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(SettingsError, match=r"cannot listen at 192\.0\.2\.1, port 80"):
        bind("192.0.2.1", 80)
    with pytest.raises(SettingsError, match="there is no host"):
        bind("no such host", 80)


def test_who_can_reach_an_address_is_known():
    with bind("127.0.0.1", 0) as local, bind("0.0.0.0", 0) as everywhere:
        assert (is_loopback(local), is_loopback(everywhere)) == (True, False)


@pytest.mark.parametrize("pieces", [[], [b"GET /sta", b"te HTTP/1.1\r\nHost: lo", b"calhost\r\nX: "]])
def test_a_client_that_sends_no_whole_head_is_hung_up_on(pieces: list[bytes]):
    place, answers = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        with socket.create_connection(place.bound.getsockname()) as slow:
            slow.settimeout(BOUND_S)
            place.state()  # connections are accepted in their order: the clock of this one runs
            for piece in pieces:
                slow.sendall(piece)
                place.pass_time(0.3 * Connection.header_s)  # each comes in time for itself
            place.pass_time(0.3 * Connection.header_s if pieces else Connection.header_s)
            answers.append(slow.recv(100))
        place.signal()

    assert place.serve(client) == []
    assert answers == [b""]


def test_a_stream_may_take_longer_than_the_head_of_its_request():
    place, seen = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        seen.append(next(lines))
        place.pass_time(2 * Connection.header_s)
        place.may_end.open()
        seen.extend(lines)
        place.signal()

    assert place.serve(client) == []
    assert seen == ["begun", "ended"]


def exchange(place: Place, request: bytes) -> bytes:
    """All that the server answers to these bytes, until it hangs up."""
    with socket.create_connection(place.bound.getsockname()) as raw:
        raw.settimeout(BOUND_S)
        raw.sendall(request)
        answer = bytearray()
        while piece := raw.recv(2**16):
            answer += piece
        return bytes(answer)


def exchange_all(requests: list[bytes]) -> list[bytes]:
    """The answers of one server to these requests, each on a connection of its own."""
    place, answers = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        answers.extend(exchange(place, request) for request in requests)
        place.signal()

    assert place.serve(client) == []
    return answers


def make_head(num_bytes: int, where: str) -> bytes:
    """The head of a request, of exactly so many bytes, most of which are at one place."""
    path, header = (b"/state", b"") if where != "path" else (b"/state?", b"")
    bare = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%b\r\n"
    if where == "path":
        return bare % (path + b"a" * (num_bytes - len(bare % (path, b""))), b"")
    if where == "blanks":
        header = b"X-Long:" + b" " * (num_bytes - len(bare % (path, b"X-Long:\r\n"))) + b"\r\n"
    elif where == "header":
        header = b"X-Long: " + b"a" * (num_bytes - len(bare % (path, b"X-Long: \r\n"))) + b"\r\n"
    else:
        number, rest = divmod(num_bytes - len(bare % (path, b"")), 10)
        header = b"X-Many: \r\n" * (number - 1) + b"X-Many: " + b"a" * rest + b"\r\n"
    return bare % (path, header)


WHERE = ("path", "header", "headers", "blanks")


@pytest.mark.parametrize("num_bytes", [64 * 2**10 + 1, 100_000, 200_000])
def test_a_head_beyond_the_limit_is_refused_with_431_though_it_comes_at_once(num_bytes: int):
    heads = [make_head(num_bytes, where) for where in WHERE]
    assert {len(head) for head in heads} == {num_bytes}

    for answer in exchange_all(heads):
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close" in answer.lower()
        assert b"65,536" in answer


def test_a_head_of_just_the_limit_is_served():
    answers = exchange_all([make_head(64 * 2**10, where) for where in WHERE])

    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * len(WHERE)


def test_a_second_head_on_the_same_connection_is_bounded_too():
    first = b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n"

    (answer,) = exchange_all([first + make_head(100_000, "header")])

    assert answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 431 " in answer


def test_a_body_whose_length_is_told_in_two_ways_is_refused_and_the_connection_closed():
    framings = [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: +5\r\n",
    ]
    head = b"POST /state HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    smuggled = b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n"

    for answer in exchange_all([head % framing + b"0\r\n\r\n" + smuggled for framing in framings]):
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("path", ["/stream", "/state"])
def test_whoever_keeps_a_server_from_ending_is_disconnected_and_nothing_is_logged_as_an_error(
    path: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("bough.server.http.listening._GRACE_S", 0.3)
    place = Place(stop_s=0.2 if times == 1 else BOUND_S)  # the second signal must come while it serves
    place.app.add_api_route("/state", place.read_body, methods=["POST"])

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        with socket.create_connection(place.bound.getsockname()) as stays:
            body = b"Content-Length: 9\r\n\r\n{" if path == "/state" else b"\r\n"  # one sends only half of its request
            method = b"POST" if path == "/state" else b"GET"
            stays.sendall(method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + body)
            if path == "/state":
                place.is_reading.wait()
            else:
                assert stays.recv(1000)
            place.signal(times)
            stays.settimeout(BOUND_S)
            with contextlib.suppress(ConnectionError):
                while stays.recv(1000):
                    pass

    assert place.serve(client) == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
