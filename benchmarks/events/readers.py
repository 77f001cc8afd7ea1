"""`python -m benchmarks.events.readers PORT NUMBER`: readers of `/api/events`, in a process of their own.

On the line "open" it connects and writes "open" when every reader has been told something; on "close" it disconnects, and
writes what the readers have got, as JSON. One thread reads all connections and counts bytes alone.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from bough.errors import EngineError

_WAIT_S = 60.0
_READ_BYTES = 1 << 16
_REQUEST = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True)
class ReaderFigures:
    """What one reader has got, on the average, after its first bytes."""

    num_bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


class ReaderProcess:
    """The process of the readers, as the benchmark uses it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def open(self) -> None:
        """Have all readers connected."""
        if self._ask("open") != "open\n":
            raise EngineError("the readers of events could not connect")

    def close(self) -> ReaderFigures:
        """Have all readers disconnected."""
        return ReaderFigures(**json.loads(self._ask("close")))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@contextmanager
def readers(port: int, number: int) -> Iterator[ReaderProcess]:
    """A process of readers, which are not connected yet."""
    command = [sys.executable, "-m", "benchmarks.events.readers", str(port), str(number)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield ReaderProcess(process)
    finally:
        process.communicate()  # it ends with its input


def _read_while_open(port: int, number: int) -> Iterator[ReaderFigures]:
    """Connect at the line "open", read, and yield at the line "close"; again and again until the input ends."""
    while sys.stdin.readline():
        with selectors.DefaultSelector() as selector:
            connections = [_connect(port) for _ in range(number)]
            for each in connections:
                selector.register(each, selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            print("open", flush=True)
            started_s, num_bytes = time.perf_counter(), 0
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if sys.stdin in ready:
                    break
                num_bytes += sum(len(_read(each)) for each in ready)
            sys.stdin.readline()
            yield ReaderFigures(num_bytes / number, time.perf_counter() - started_s)
        for each in connections:
            each.close()


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
    connection.sendall(_REQUEST)
    head = _read(connection)
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server refused a reader: {head[:2000].decode(errors='replace')}")
    return connection


def _read(connection: object) -> bytes:
    assert isinstance(connection, socket.socket)
    data = connection.recv(_READ_BYTES)
    if not data:
        raise SystemExit("the server has ended a reader's stream")
    return data


if __name__ == "__main__":
    for found in _read_while_open(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(asdict(found)), flush=True)
