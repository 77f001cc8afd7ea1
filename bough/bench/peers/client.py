"""One server with OpenAI's API.

If a server refuses a field that others need, the request is sent again without that field, and a note says so. A server
that cannot be reached any more is lost: it gets no more requests.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from typing import Any

import httpx

from bough.bench.server import AnswerError, ReceivedAnswer, StreamedRequest
from bough.errors import RequestError
from bough.types import Message

CONNECT_S = 10.0
PIECE_S = 120.0  # the longest wait for the next piece of an answer

_OPTIONAL = ("ignore_eos", "stream_options")  # in the order in which they are left out
_REFUSED = (400, 415, 422)
_MISSING = (404, 405, 501)

_ADDRESS = re.compile(r"(?:(?P<name>[^=/#]+)=)?(?P<url>https?://[^#\s]+)(?:#(?P<model>\S+))?")


class PeerError(AnswerError):
    """A server did not answer as it should; the text says which and how."""


class Peer:
    """A server. `name` is for tables; `notes` says what was done differently with it, and what it does not report."""

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

    def complete(self, prompt: str, max_tokens: int) -> ReceivedAnswer:
        """Continue a text; as the only message of a chat where the server has no plain completions."""
        if self._has_completions:
            try:
                return self._ask("/v1/completions", {"prompt": prompt}, max_tokens)
            except PeerError as error:
                if error.status not in _MISSING:
                    raise
        received = self.chat([{"role": "user", "content": prompt}], max_tokens)
        self._has_completions = False  # only now: an unknown model has the same status
        self.note("has no /v1/completions: prompts are sent as chats")
        return received

    def chat(self, messages: list[Message], max_tokens: int) -> ReceivedAnswer:
        return self._ask("/v1/chat/completions", {"messages": messages}, max_tokens)

    def _ask(self, path: str, content: dict[str, Any], max_tokens: int) -> ReceivedAnswer:
        """Ask greedily for an answer of a fixed length. Raises PeerError."""
        if self._is_lost:
            raise PeerError(f"{self.name} was lost before")
        if time.perf_counter() > self.stop_at_s:
            raise PeerError(f"{self.name}: the time for all is up")
        body = {"model": self.model, **content, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        left_out, refusals = set(self._left_out), list[str]()
        while True:
            fields = {name: value for name, value in body.items() if name not in left_out}
            try:
                received = StreamedRequest(self._client, self.url + path, fields, stop_at_s=self.stop_at_s).receive()
            except AnswerError as error:
                rest = [name for name in _OPTIONAL if name not in left_out]
                if error.status not in _REFUSED or not rest:
                    raise PeerError(f"{self.name}: {error}", error.status) from error
                left_out.add(next((name for name in rest if name in str(error)), rest[0]))  # the one that it names
                refusals.append(str(error))
            except httpx.TransportError as error:
                self._is_lost = not self._is_there()
                raise PeerError(f"{self.name}: {type(error).__name__} {error}".rstrip()) from error
            else:
                if received.counted_by == "pieces":
                    self.note("tells no usage: its tokens are counted by pieces of text")
                self._left_out = left_out  # from now on, because a request succeeded without them
                if refusals:
                    self.note(f"is asked without {' and '.join(sorted(left_out))}: {'; '.join(refusals)}")
                return received

    def _is_there(self) -> bool:
        with suppress(httpx.TransportError):
            self._client.get(f"{self.url}/v1/models", timeout=CONNECT_S)
            return True
        return False


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
