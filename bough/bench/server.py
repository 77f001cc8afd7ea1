"""Servers as their clients see them: a Bough in another process, and streamed answers of OpenAI's API with their times."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from bough.errors import EngineError

LOG = "server.log"
_START_S = 300.0
_STOP_S = 120.0
_SHOWN_CHARACTERS = 2000  # of the log, if the server does not start
ANSWER_S = 300.0  # the longest time of one answer
MAX_BYTES = 32 * 2**20  # of one answer

_TEXT_FIELDS = ("content", "text", "reasoning_content", "reasoning")

CountedBy = Literal["usage", "pieces"]


@contextmanager
def serving(model: str | None, *flags: str) -> Iterator[str]:
    """Start `bough serve` on a free port and yield its address. Its tree on disk is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="bough-bench-") as folder:
        words = ("serve", *(("--model", model) if model else ()), *flags)
        with run_server(Path(folder), "bough", *words) as url:
            yield url


@contextmanager
def run_server(folder: Path, module: str, *words: str) -> Iterator[str]:
    """Run a module with `--port` after these words, its cache and its log in a folder; yield the address that it serves.

    Its standard input ends with this process. Raises EngineError, with the end of the log, if it does not start.
    """
    port = find_free_port()
    command = [sys.executable, "-m", module, *words, "--port", str(port)]
    environment = os.environ | {"BOUGH_CACHE_FOLDER": str(folder)}
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", folder / LOG)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


def find_free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    said = log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]
    raise EngineError(f"the server did not become ready within {_START_S:.0f} s: {said.strip()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


class AnswerError(EngineError):
    """A server did not answer as it should. `status` is the answer's if it was not 200, else 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ReceivedAnswer:
    """One answer: when its first and last piece came, in seconds from the request, and the usage that the server reported.

    `prompt_tokens` and `cached_tokens` are None if it did not report them. Without a usage, each piece counts as one token.
    """

    first_s: float
    last_s: float
    tokens: int
    counted_by: CountedBy
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    finish_reason: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """The speed after the first token; None for an answer of less than two, or of one piece."""
        return (self.tokens - 1) / (self.last_s - self.first_s) if self.tokens > 1 and self.last_s > self.first_s else None


class StreamedRequest:
    """One streamed request. Iterating over it sends it, and yields the `time.perf_counter` of each piece of text.

    Stopping early closes the connection. Raises AnswerError for an answer of another form than OpenAI's API has, for one
    that takes longer than `limit_s` or past `stop_at_s`, and for one that is too large.
    """

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        body: dict[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        limit_s: float = ANSWER_S,
        stop_at_s: float = math.inf,
    ) -> None:
        self._client, self._url, self._body, self._headers = client, url, {**body, "stream": True}, headers
        self._limit_s, self._stop_at_s = limit_s, stop_at_s
        self._started_s = 0.0
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""

    def __iter__(self) -> Iterator[float]:
        self._started_s = time.perf_counter()
        with self._client.stream("POST", self._url, json=self._body, headers=self._headers) as response:
            if response.status_code != 200:  # the body of an error is short
                said = _error_text(next(response.iter_bytes(), b"").decode(errors="replace"))
                raise AnswerError(f"{response.status_code} {said}", response.status_code)
            for line in _lines(response, min(self._started_s + self._limit_s, self._stop_at_s)):
                if self._read(line):
                    self._arrivals.append(time.perf_counter())
                    yield self._arrivals[-1]

    def receive(self) -> ReceivedAnswer:
        """Send the request, and read the whole answer. Raises AnswerError if it has no text."""
        for _ in self:
            pass
        if not self._arrivals:
            raise AnswerError("the answer has no text")
        tokens = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        return ReceivedAnswer(
            self._arrivals[0] - self._started_s,
            self._arrivals[-1] - self._started_s,
            len(self._arrivals) if tokens is None else int(tokens),
            "pieces" if tokens is None else "usage",
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            "".join(self._texts),
            self._finish_reason,
        )

    def _read(self, line: str) -> bool:
        """Read one line of the stream; returns whether it has text."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data in ("", "[DONE]"):
            return False
        before = len(self._texts)
        try:
            event = json.loads(data)
            if "error" in event:
                raise AnswerError(_error_text(data))
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or choice
                if text := next(filter(None, map(delta.get, _TEXT_FIELDS)), ""):
                    self._texts.append(text)
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise AnswerError(f"a piece is not as OpenAI's API has it: {data[:200]}") from error
        return len(self._texts) > before


def _lines(response: httpx.Response, deadline_s: float) -> Iterator[str]:
    """The lines of a stream. Raises AnswerError if it takes too long, or is too large."""
    rest, total = b"", 0
    for chunk in response.iter_bytes():
        total += len(chunk)
        if total > MAX_BYTES or time.perf_counter() > deadline_s:
            raise AnswerError(f"an answer took more than {ANSWER_S:.0f} s, {MAX_BYTES:,} bytes or the time for all")
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


def _error_text(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return body.strip()[:300]
