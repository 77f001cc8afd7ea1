"""One server with OpenAI's API, and a streamed answer of it as its client sees it.

A server may refuse a field that others need: it is then asked again without that field, and a note says so. A server that
cannot be reached any more is lost: it is not asked again.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from bough.errors import EngineError, RequestError
from bough.types import Message

CONNECT_S = 10.0
PIECE_S = 120.0  # the longest wait for the next piece of an answer
ANSWER_S = 300.0  # the longest time of one answer
MAX_BYTES = 32 * 2**20  # of one answer

_OPTIONAL = ("ignore_eos", "stream_options")  # in the order in which they are left out
_REFUSED = (400, 415, 422)
_MISSING = (404, 405, 501)

_ADDRESS = re.compile(r"(?:(?P<name>[^=/#]+)=)?(?P<url>https?://[^#\s]+)(?:#(?P<model>\S+))?")

CountedBy = Literal["usage", "pieces"]


class PeerError(EngineError):
    """A server did not answer as it should; the text says which and how."""


@dataclass(frozen=True)
class Received:
    """One answer: when its first and last piece came, in seconds from the request, and what the server counted.

    `prompt_tokens` and `cached_tokens` are None if the server does not tell them. Without a usage, every piece counts as
    one token.
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


class Peer:
    """A server. `name` is for tables; `notes` says what was done differently with it, and what it does not tell."""

    def __init__(self, name: str, url: str, model: str = "", api_key: str = "") -> None:
        self.name, self.url, self.model = name, url, model
        self.stop_at_s = math.inf  # by `time.perf_counter`: later requests fail
        self.notes: list[str] = []
        self._is_lost = False
        self._left_out: set[str] = set()
        self._has_completions = True
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            timeout=httpx.Timeout(PIECE_S, connect=CONNECT_S),
            headers=headers,
            limits=httpx.Limits(max_keepalive_connections=0),  # servers close idle connections, some within seconds
        )

    @classmethod
    def parse(cls, address: str, api_key: str = "") -> Peer:
        """A server from `[NAME=]URL[#MODEL]`; its name is otherwise its host and port. Raises RequestError."""
        found = _ADDRESS.fullmatch(address.strip())
        if found is None:
            raise RequestError(f"{address!r} is not an address such as http://127.0.0.1:8080 or name=http://host/v1#model")
        url = found["url"].rstrip("/").removesuffix("/v1")
        return cls(found["name"] or url.partition("://")[2], url, found["model"] or "", api_key)

    def close(self) -> None:
        self._client.close()

    def connect(self) -> None:
        """Find the model to ask for, if none is given: the first that the server lists. Raises PeerError."""
        listed = _find_models(self._client, self.url)
        if not self.model:
            self.model = listed[0] if listed else "default"
            self.note(f"is asked for the model {self.model}" + ("" if listed else ", because it lists none"))

    def note(self, text: str) -> None:
        """Keep a remark for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def complete(self, prompt: str, max_tokens: int) -> Received:
        """Continue a text; as the only message of a chat where the server has no plain completions."""
        if self._has_completions:
            try:
                return self._ask("/v1/completions", {"prompt": prompt}, max_tokens)
            except _NoSuchPath:
                pass
        received = self.chat([{"role": "user", "content": prompt}], max_tokens)
        self._has_completions = False  # only now: an unknown model has the same status
        self.note("has no /v1/completions: prompts are sent as chats")
        return received

    def chat(self, messages: list[Message], max_tokens: int) -> Received:
        """Answer a chat."""
        return self._ask("/v1/chat/completions", {"messages": messages}, max_tokens)

    def _ask(self, path: str, content: dict[str, Any], max_tokens: int) -> Received:
        """Ask greedily for an answer of a fixed length. Raises PeerError."""
        if self._is_lost:
            raise PeerError(f"{self.name} was lost before")
        if time.perf_counter() > self.stop_at_s:
            raise PeerError(f"{self.name}: the time for all is up")
        body = {"model": self.model, **content, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        left_out, refusals = set(self._left_out), list[str]()
        while True:
            try:
                received = self._send(path, {name: value for name, value in body.items() if name not in left_out})
            except _Refused as error:
                left_out.add(self._choose_field(error, left_out))
                refusals.append(str(error))
            except httpx.TransportError as error:
                self._is_lost = not self._is_there()
                raise PeerError(f"{self.name}: {type(error).__name__} {error}".rstrip()) from error
            else:
                self._leave_out(left_out, refusals)
                return received

    def _is_there(self) -> bool:
        try:
            self._client.get(f"{self.url}/v1/models", timeout=CONNECT_S)
        except httpx.TransportError:
            return False
        return True

    def _choose_field(self, error: _Refused, left_out: set[str]) -> str:
        """The field to do without: the one that the error names, else the next. Raises PeerError if none is left."""
        rest = [name for name in _OPTIONAL if name not in left_out]
        if not rest:
            raise PeerError(f"{self.name}: {error}") from error
        return next((name for name in rest if name in str(error)), rest[0])

    def _leave_out(self, names: set[str], refusals: list[str]) -> None:
        """Do without these fields from now on, because a request succeeded without them."""
        self._left_out = names
        if refusals:
            self.note(f"is asked without {' and '.join(sorted(names))}: {'; '.join(refusals)}")

    def _send(self, path: str, body: dict[str, Any]) -> Received:
        started_s = time.perf_counter()
        answer = _Answer(self.name, started_s)
        with self._client.stream("POST", f"{self.url}{path}", json=body) as response:
            self._check(response, path)
            for line in _lines(response, min(started_s + ANSWER_S, self.stop_at_s), self.name):
                answer.read(line)
        received = answer.received()
        if received.counted_by == "pieces":
            self.note("tells no usage: its tokens are counted by pieces of text")
        return received

    def _check(self, response: httpx.Response, path: str) -> None:
        """Raise what a status means. The body of an error is short."""
        status = response.status_code
        if status == 200:
            return
        said = f"{status} {_error_text(next(response.iter_bytes(), b'').decode(errors='replace'))}"
        if status in _MISSING and path == "/v1/completions":
            raise _NoSuchPath(said)
        raise _Refused(said) if status in _REFUSED else PeerError(f"{self.name}: {said}")


class _Refused(PeerError):
    """The server does not take the request as it is."""


class _NoSuchPath(PeerError):
    """The server does not have this endpoint."""


class _Answer:
    """The pieces of one stream so far."""

    def __init__(self, name: str, started_s: float) -> None:
        self._name, self._started_s = name, started_s
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""

    def read(self, line: str) -> None:
        """Read one line of the stream. Raises PeerError for an error in it, or for what is no JSON."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data in ("", "[DONE]"):
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise PeerError(f"{self._name}: {_error_text(data)}")
            self._read_event(event)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PeerError(f"{self._name}: a piece is not as OpenAI's API has it: {data[:200]}") from error

    def _read_event(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or choice
            text = (
                delta.get("content") or delta.get("text") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            )
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if text:
                self._arrivals.append(time.perf_counter() - self._started_s)
                self._texts.append(text)
        self._usage = event.get("usage") or self._usage

    def received(self) -> Received:
        """The whole answer. Raises PeerError if it has no text."""
        if not self._arrivals:
            raise PeerError(f"{self._name}: the answer has no text")
        tokens = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        return Received(
            self._arrivals[0],
            self._arrivals[-1],
            len(self._arrivals) if tokens is None else int(tokens),
            "pieces" if tokens is None else "usage",
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            "".join(self._texts),
            self._finish_reason,
        )


def _lines(response: httpx.Response, deadline_s: float, name: str) -> Iterator[str]:
    """The lines of a stream. Raises PeerError if it takes too long, or is too large."""
    rest, total = b"", 0
    for chunk in response.iter_bytes():
        total += len(chunk)
        if total > MAX_BYTES or time.perf_counter() > deadline_s:
            raise PeerError(f"{name}: an answer took more than {ANSWER_S:.0f} s, {MAX_BYTES:,} bytes or the time for all")
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


def _find_models(client: httpx.Client, url: str) -> list[str]:
    """The names of the models that a server lists. Raises PeerError if it cannot be reached."""
    try:
        answer = client.get(f"{url}/v1/models")
        listed = answer.raise_for_status().json()["data"]
        return [str(each["id"]) for each in listed]
    except httpx.TransportError as error:
        raise PeerError(f"{url} cannot be reached: {type(error).__name__} {error}".rstrip()) from error
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        return []


def _error_text(body: str) -> str:
    """The message of an error body, or its beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return body.strip()[:300]
