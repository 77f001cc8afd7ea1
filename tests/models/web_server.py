"""A web server on the loopback that serves bytes and misbehaves on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW_BYTES = 2**20
DROP_BYTES = 1024
DROP_S = 0.05


@dataclass
class Site:
    """What the server has, how it behaves, and what it was asked.

    `drops`: bytes after which each answer breaks off. `finishing`: until it is set, the second half of a file of more than
    `SLOW_BYTES` comes by drops, so that a test sees a download in the middle however fast the machine is.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)
    finishing: threading.Event | None = None
    honours_ranges: bool = True
    shifts_ranges: bool = False
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(site))
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler_of(site: Site) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            asked_range = self.headers.get("Range")
            site.asked.append(f"{self.command} {path}" + (f" {asked_range}" if asked_range else ""))
            if path not in site.files:
                self.send_response(404)
                self._end_headers("0")
                return
            body = self._begin(path, site.files[path], asked_range)
            if not with_body or body is None:
                return
            cut = site.drops.pop(0) if site.drops else len(body)
            self._write(body[:cut])
            self.close_connection = True

        def _write(self, body: bytes) -> None:
            done = 0
            if site.finishing is not None and len(body) > SLOW_BYTES:
                done = len(body) // 2
                self.wfile.write(body[:done])
                while done < len(body) - DROP_BYTES and not site.finishing.wait(DROP_S):
                    self.wfile.write(body[done : done + DROP_BYTES])
                    done += DROP_BYTES
            self.wfile.write(body[done:])

        def _begin(self, path: str, body: bytes, asked_range: str | None) -> bytes | None:
            total = len(body)
            start = int(asked_range.removeprefix("bytes=").split("-")[0]) if asked_range and site.honours_ranges else 0
            if start >= total > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self._end_headers("0")
                return None
            start = max(0, start - site.shifts_ranges)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            self.send_header("Content-Type", site.types.get(path, "application/octet-stream"))
            self._end_headers(str(total - start))
            return body[start:]

        def _end_headers(self, length: str) -> None:
            for name, value in ({"Content-Length": length} | site.headers).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Recorder:
    """A progress that remembers what it heard."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.totals: list[int | None] = []
        self.done: list[int] = []
        self.num_finished = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.labels.append(label)
        self.totals.append(total_bytes)
        self.done.append(0)

    def advance(self, num_bytes: int) -> None:
        self.done[-1] += num_bytes

    def finish(self) -> None:
        self.num_finished += 1
