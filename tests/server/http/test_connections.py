"""Connections: how many there may be, and how long they wait for clients that say or take nothing."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import h11
import pytest
import uvicorn

from bough.server.http.connections import Connection, RequestReader, WaitingConnections, connections_within
from tests.server.http.test_listening import Place
from tests.waiting import BOUND_S

PIECE = b"x" * 2**15


def connect(place: Place) -> socket.socket:
    """A client that has sent nothing yet."""
    client = socket.create_connection(place.bound.getsockname(), timeout=BOUND_S)
    client.settimeout(BOUND_S)
    return client


def connect_next(place: Place) -> socket.socket:
    """The same, once those before it were accepted: for one that finds no room in the backlog, a second goes by."""
    place.state()
    return connect(place)


def ask(place: Place, client: socket.socket) -> bytes:
    client.sendall(b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client.recv(12)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_some_files_are_left_for_all_else_whatever_the_limit_is() -> None:
    assert [connections_within(num_files) for num_files in (1, 256, 1024, 4096, 10**6)] == [1, 128, 512, 3584, 8192]


def test_idle_connections_keep_no_new_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.server.http.listening.allow_many_files", lambda: 8)
    place, seen = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        with ExitStack() as stack:
            idle = [stack.enter_context(connect_next(place)) for _ in range(40)]
            seen.append(place.state()["is_starting"])
            seen.append(all(is_closed(each) for each in idle[:30]))
            seen.append(ask(place, idle[-1]))
        place.signal()

    assert place.serve(client) == []
    assert seen == [False, True, b"HTTP/1.1 200"]


def test_who_is_just_sending_a_body_is_not_closed_for_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.server.http.listening.allow_many_files", lambda: 8)
    place, seen = Place(), []
    place.app.add_api_route("/state", place.read_body, methods=["POST"])

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        with ExitStack() as stack:
            sender = stack.enter_context(connect(place))
            sender.sendall(b"POST /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n")
            for _ in range(40):
                sender.sendall(b" ")
                place.state()  # so that it has come
                stack.enter_context(connect(place))
            seen.append(sender.recv(12))
        place.signal()

    assert place.serve(client) == []
    assert seen == [b"HTTP/1.1 200"]


def test_a_stream_goes_on_while_others_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.server.http.listening.allow_many_files", lambda: 4)
    place, seen = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        lines = place.lines()
        seen.append(next(lines))
        with ExitStack() as stack:
            half_sent = [stack.enter_context(connect_next(place)) for _ in range(12)]
            for each in half_sent:
                each.sendall(b"POST /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            place.state()
            place.may_end.open()
            seen.extend(lines)
        place.signal()

    assert place.serve(client) == []
    assert seen == ["begun", "ended"]


def test_nonsense_behind_an_early_answer_closes_the_connection_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    place, seen = Place(), []

    def client() -> None:
        assert place.is_ready.wait(BOUND_S)
        with connect(place) as other:
            other.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            seen.append(other.recv(12))
            other.sendall(b"not a length\r\n")
            with suppress(ConnectionError):
                while other.recv(1000):
                    pass
        place.signal()

    assert place.serve(client) == []
    assert seen == [b"HTTP/1.1 404"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


class Talkative:
    """An application that sends without end, or only so much, and notes when its client has gone."""

    def __init__(self, num_bytes: float) -> None:
        self._num_bytes = num_bytes
        self.is_gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        sent = 0
        while sent < self._num_bytes and not self.is_gone.is_set():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            sent += len(PIECE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Noted(Connection):
    """A connection that tells the application when it is lost."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.app.is_gone.set()  # type: ignore[union-attr]


async def leave_unread(app: Talkative) -> None:
    """Ask, read nothing, and wait until the server has disconnected."""
    with socket.create_server(("127.0.0.1", 0)) as bound, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        config = uvicorn.Config(
            app,
            http=partial(Noted, waiting=WaitingConnections(9)),
            lifespan="off",
            log_config=None,
            ws="none",  # type: ignore[arg-type]
        )
        listener = Ticking(config)
        serving = asyncio.create_task(listener.serve([bound]))
        client.connect(bound.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(app.is_gone.wait(), BOUND_S)
        listener.should_exit = True
        await serving


class Ticking(uvicorn.Server):
    """Looks after its connections at every tick, and leaves signals to others."""

    async def on_tick(self, counter: int) -> bool:
        for connection in self.server_state.connections:
            assert isinstance(connection, Connection)
            connection.watch_end()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("num_bytes", [math.inf, len(PIECE)], ids=["within an answer", "at its end"])
def test_a_client_that_takes_nothing_is_disconnected(num_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "stall_s", 0.2)
    asyncio.run(leave_unread(Talkative(num_bytes)))


@pytest.mark.parametrize("headers", [[], [("Content-Length", "11")]], ids=["without a length", "with its length"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_is_written_as_h11_writes_it(method: str, headers: list[tuple[str, str]]) -> None:
    pieces = [b"data: 1", b"", b"\n\n"] if headers else [b"data: 1\n\n", b"", b"x" * 5000, "Grüße\n\n".encode()]
    events: list[h11.Event] = [
        h11.Response(status_code=200, headers=headers),
        *(h11.Data(data=b"" if method == "HEAD" else piece) for piece in pieces),
    ]
    if not headers or method == "HEAD":
        events.append(h11.EndOfMessage())
    ours, plain = RequestReader(), h11.Connection(h11.SERVER)
    for connection in (ours, plain):
        connection.receive_data(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connection.next_event()

    assert [ours.send(event) for event in events] == [plain.send(event) for event in events]
