"""A proxy on this machine in front of a server that speaks S3, which makes mistakes when it is told to."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OWN_HEADERS = ("connection", "content-length", "transfer-encoding")


@dataclass(frozen=True)
class Answer:
    """What the server has answered. The client is told of `length` bytes, which may be more than it gets."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    length: int

    def with_body(self, body: bytes) -> Answer:
        """The same with other content, of a length that fits."""
        return replace(self, body=body, length=len(body))


@dataclass(frozen=True)
class Call:
    """A request of the client."""

    proxy: FaultyProxy
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def pass_on(self) -> Answer:
        """What the server answers."""
        connection = http.client.HTTPConnection(self.proxy.host, self.proxy.port, timeout=30)
        try:
            connection.request(self.method, self.path, self.body, self.headers)
            response = connection.getresponse()
            content = response.read()
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in OWN_HEADERS]
            return Answer(response.status, kept, content, int(response.headers.get("Content-Length", len(content))))
        finally:
            connection.close()


Fault = Callable[[Call], Answer]
"""What the client shall see. It may wait."""


class FaultyProxy:
    """Answers as `fault` says, which any thread may change. `written` are the paths that the client has written to."""

    def __init__(self, host: str, port: int) -> None:
        self.fault: Fault = Call.pass_on
        self.is_open = threading.Event()  # what hangs goes on when it is set
        self.host, self.port = host, port
        self.written: set[str] = set()


@contextmanager
def faulty_proxy(host: str, port: int) -> Iterator[tuple[FaultyProxy, str]]:
    """A proxy for the server at an address, and its own URL."""
    proxy = FaultyProxy(host, port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = proxy.fault(Call(proxy, self.command, self.path, dict(self.headers.items()), body))
            if self.command == "PUT" and answer.status == 200:
                proxy.written.add(self.path)
            self.close_connection = len(answer.body) < answer.length and self.command != "HEAD"
            try:
                self._send(answer)
            except OSError:
                self.close_connection = True  # the client has not waited

        def _send(self, answer: Answer) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(answer.length))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Be silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        proxy.is_open.set()
        server.shutdown()
        thread.join()
        server.server_close()


no_fault: Fault = Call.pass_on


def fail(status: int, *methods: str) -> Fault:
    """Every answer is this error, or those to some methods."""

    def fault(call: Call) -> Answer:
        if methods and call.method not in methods:
            return call.pass_on()
        body = b"" if call.method == "HEAD" else b"<Error><Code>Made</Code><Message>made to fail</Message></Error>"
        return Answer(status, [], body, len(body))

    return fault


def hang(call: Call) -> Answer:
    """No answer comes until the proxy is opened."""
    call.proxy.is_open.wait(30)
    return call.pass_on()


def of_content(change: Callable[[Call, Answer], Answer]) -> Fault:
    """Whoever reads an object gets what `change` makes of it; everything else is as it should be."""

    def fault(call: Call) -> Answer:
        answer = call.pass_on()
        is_object = call.method == "GET" and answer.status in (200, 206) and "?" not in call.path
        return change(call, answer) if is_object else answer

    return fault
