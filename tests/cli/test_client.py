"""How commands find the announced server: no other program gets a prompt, a key or the time of the command."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bough.cli.client import find_client
from bough.config import Settings
from bough.system.announcement import Announcement, announcing, make_announcement

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
Respond = Callable[[socket.socket, str], None]


@contextmanager
def listening(respond: Respond) -> Iterator[tuple[str, list[str]]]:
    """A program at a port that answers each request with `respond`; the address, and the heads of the requests."""
    seen: list[str] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    seen.append(client.recv(65_536).decode())
                    respond(client, seen[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", seen


def proving(announcement: Announcement) -> Respond:
    """Answers with the proof, whatever the path, and gives the same JSON to later requests."""

    def respond(client: socket.socket, head: str) -> None:
        challenge = head.partition("challenge=")[2].partition(" ")[0]
        client.sendall(f'{HEAD}{{"proof": "{announcement.prove(challenge)}"}}'.encode())

    return respond


def send(text: str) -> Respond:
    return lambda client, _: client.sendall(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        f'{HEAD}{{"proof": "0"}}',
        f"{HEAD}[]",
        HEAD + "[" * 10_000,
        HEAD + '{"proof": "' + "0" * 10_000,
        "HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        "SSH-2.0-none\r\n",
        "",
    ],
)
def test_another_program_at_the_port_is_not_used_and_gets_no_key(tmp_path: Path, text: str) -> None:
    with listening(send(text)) as (url, seen), announcing(tmp_path, make_announcement(url)):
        assert find_client(Settings(cache_folder=tmp_path, api_key="secret")) is None

    assert len(seen) == 1 and "secret" not in seen[0]


def test_a_program_that_never_finishes_its_answer_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("bough.cli.client._PROOF_TIMEOUT_S", 0.3)
    ends = threading.Event()

    def drip(client: socket.socket, _: str) -> None:
        client.sendall(HEAD.encode())
        while not ends.wait(0.05):
            client.sendall(b" ")

    with listening(drip) as (url, _), announcing(tmp_path, make_announcement(url)):
        try:
            assert find_client(Settings(cache_folder=tmp_path)) is None
        finally:
            ends.set()


def test_requests_to_the_announced_server_go_through_no_proxy(tmp_path: Path, monkeypatch) -> None:
    announcement = make_announcement("")

    with listening(send(f"{HEAD}{{}}")) as (proxy, proxied), listening(proving(announcement)) as (url, seen):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        everywhere = url.replace("127.0.0.1", "0.0.0.0")  # as a server that listens everywhere announces itself
        with announcing(tmp_path, Announcement(announcement.pid, everywhere, announcement.nonce)):
            client = find_client(Settings(cache_folder=tmp_path, api_key="secret"))
        assert client is not None
        with client:
            client.get("/health")

    assert proxied == []
    assert "Bearer secret" in seen[-1]
