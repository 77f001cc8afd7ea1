"""`python -m benchmarks.streams.clients SETUP`: clients that stream answers from a server, in a process of their own.

One thread reads all connections. It only counts events, so that it costs far less than the server. It writes "open" and
"closed" at the ends of the window in which all streams run, and then what it has counted, as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.streams.window import StreamWindow

Api = Literal["openai", "ollama"]
PATHS: dict[Api, str] = {"openai": "/v1/chat/completions", "ollama": "/api/chat"}
_EVENT_ENDS: dict[Api, bytes] = {"openai": b"\n\n", "ollama": b"}\n"}
_STREAM_ENDS: dict[Api, bytes] = {"openai": b"data: [DONE]", "ollama": b'"done":true'}
_FIRST_EVENTS: dict[Api, int] = {"openai": 1, "ollama": 0}  # that come before the first token: the role
_WAIT_S = 60.0
_READ_BYTES = 1 << 16
_TAIL_BYTES = 16


@dataclass(frozen=True)
class ClientSetup:
    """What the clients ask, of which server. All prompts begin with `prompt_bytes` of the same text."""

    port: int = 0
    model: str = "words"
    api: Api = "openai"
    num_clients: int = 64
    num_tokens: int = 400
    prompt_bytes: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    first_number: int = 0  # in the prompt of the first client
    ignores_eos: bool = False  # of OpenAI's API alone

    def body(self, number: int) -> dict[str, Any]:
        """The request of one client."""
        text = ("All clients share this text. " * (self.prompt_bytes // 29 + 1))[: self.prompt_bytes]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{text} {self.first_number + number}"}],
            "stream": True,
        }
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        if self.api == "ollama":
            return body | {"options": sampling | {"num_predict": self.num_tokens}}
        return body | sampling | {"max_tokens": self.num_tokens} | ({"ignore_eos": True} if self.ignores_eos else {})

    def request(self, number: int) -> bytes:
        """The same, as it is sent."""
        body = json.dumps(self.body(number)).encode()
        head = f"POST {PATHS[self.api]} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


@dataclass(frozen=True)
class ClientFigures:
    """What the clients have counted while all streams ran, and the processor time that they took for it."""

    num_events: int
    num_reads: int
    num_bytes: int
    seconds: float
    cpu_s: float


@dataclass
class _Clients:
    """The connections of all clients, and what has arrived."""

    setup: ClientSetup
    num_reads: int = 0
    num_bytes: int = 0
    opened_cpu_s: float = 0.0
    cpu_s: float = 0.0
    tails: dict[int, bytes] = field(default_factory=dict)  # the last bytes of each, where an event may be cut
    early: dict[int, int] = field(default_factory=dict)  # events of each that come before its first token
    window: StreamWindow = field(init=False)

    def __post_init__(self) -> None:
        self.window = StreamWindow(self.setup.num_clients, self._open, self._close)

    def _open(self) -> None:
        self.num_reads = self.num_bytes = 0
        self.opened_cpu_s = time.process_time()
        print("open", flush=True)

    def _close(self) -> None:
        self.cpu_s = time.process_time() - self.opened_cpu_s
        print("closed", flush=True)

    def run(self) -> ClientFigures:
        """Send all requests, and read until every stream has ended."""
        with selectors.DefaultSelector() as selector:
            for number in range(self.setup.num_clients):
                connection = socket.create_connection(("127.0.0.1", self.setup.port), timeout=_WAIT_S)
                connection.sendall(self.setup.request(number))
                selector.register(connection, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(_WAIT_S)
                if not ready:
                    raise SystemExit(f"nothing arrived for {_WAIT_S:.0f} s")
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._read(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        return ClientFigures(self.window.num_pieces, self.num_reads, self.num_bytes, self.window.seconds, self.cpu_s)

    def _read(self, connection: socket.socket, number: int) -> bool:
        """Read what has arrived for one client; returns whether more will come."""
        data, tail = connection.recv(_READ_BYTES), self.tails.get(number)
        if tail is None:
            _require_success(data)
            tail = b""
        self.num_reads += 1
        self.num_bytes += len(data)
        if not data or _STREAM_ENDS[self.setup.api] in tail + data:
            self.window.end()
            return False
        end = _EVENT_ENDS[self.setup.api]
        self.tails[number] = data[-_TAIL_BYTES:]
        num_events = (tail[1 - len(end) :] + data).count(end)
        num_early = min(num_events, self.early.get(number, _FIRST_EVENTS[self.setup.api]))
        self.early[number] = self.early.get(number, _FIRST_EVENTS[self.setup.api]) - num_early
        if num_events > num_early:
            self.window.add(number, num_events - num_early)
        return True


def _require_success(head: bytes) -> None:
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server refused a request: {head[:2000].decode(errors='replace')}")


if __name__ == "__main__":
    print(json.dumps(asdict(_Clients(ClientSetup(**json.loads(sys.argv[1]))).run())), flush=True)
