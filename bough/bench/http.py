"""`bough bench http`: the switching workload over HTTP, against a server with the tree and others.

Those are a server without a cache; or several replicas on Ray, and as many servers that know nothing of each other.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from bough.bench.workload import ScriptedChat, SwitchSetup
from bough.errors import EngineError

START_S = 300.0


@dataclass(frozen=True)
class HttpTurn:
    """One request, as its client measured it."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float
    text: str


@dataclass
class HttpFigures:
    """The turns with each server. Times are medians over the turns after each conversation's first."""

    turns: dict[str, list[HttpTurn]] = field(default_factory=dict)

    def later(self, name: str) -> list[HttpTurn]:
        return [turn for turn in self.turns[name] if turn.turn > 0]

    def as_dict(self) -> dict[str, Any]:
        return {name: self._figures(name) for name in self.turns} | {"answers_equal": self.answers_equal}

    @property
    def answers_equal(self) -> bool:
        answers = [[turn.text for turn in turns] for turns in self.turns.values()]
        return all(each == answers[0] for each in answers)

    def _figures(self, name: str) -> dict[str, float]:
        later = self.later(name)
        times = [1000 * turn.first_token_s for turn in later]
        return {
            "later_first_token_ms": round(statistics.median(times), 1),
            "later_first_token_mean_ms": round(statistics.mean(times), 1),
            "later_cached_share": round(sum(t.cached_tokens for t in later) / sum(t.prompt_tokens for t in later), 4),
            "total_s": round(sum(turn.total_s for turn in self.turns[name]), 2),
        }


@dataclass(frozen=True)
class HttpServers:
    """Servers to compare: so many alike, with these flags."""

    name: str
    flags: tuple[str, ...] = ()
    count: int = 1


def choose_servers(num_replicas: int) -> list[HttpServers]:
    """One server with the tree, and what it is compared with. Replicas on one machine share its processors."""
    if not num_replicas:
        return [HttpServers("tree"), HttpServers("no cache", ("--no-cache",))]
    each = ("--threads", str(max(1, (os.cpu_count() or 1) // num_replicas)))
    return [
        HttpServers("one server"),
        HttpServers(f"{num_replicas} replicas", ("--ray", "local", "--replicas", str(num_replicas), *each)),
        HttpServers("round robin", each, num_replicas),
    ]


@contextmanager
def serving_all(model: str | None, servers: HttpServers) -> Iterator[list[str]]:
    """Start servers, each with a tree of its own, and yield their addresses."""
    with ExitStack() as held:
        yield [held.enter_context(serving(model, *servers.flags)) for _ in range(servers.count)]


@contextmanager
def serving(model: str | None, *flags: str) -> Iterator[str]:
    """Start a server on a free port and yield its address. Its tree on disk is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="bough-bench-") as folder:
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "bough",
            "serve",
            "--port",
            str(port),
            *(("--model", model) if model else ()),
            *flags,
        ]
        environment = os.environ | {"BOUGH_CACHE_FOLDER": folder}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url)
            yield url
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """A port of this machine that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a server takes requests. Raises EngineError if its process ends, or it takes too long."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise EngineError(f"the server did not become ready within {START_S:.0f} s; run `bough serve` to see why")


def run_http(urls: Sequence[str], model: str, setup: SwitchSetup) -> Iterator[HttpTurn]:
    """Run the workload with streamed requests, and yield after each. Several servers take requests in turn.

    Which of them takes a conversation's turn moves on with each turn, as it would beside other clients.
    """
    conversations = [ScriptedChat(number, setup) for number in range(setup.conversations)]
    with httpx.Client(timeout=600) as client:
        for turn in range(setup.turns):
            for conversation in conversations:
                url = urls[(conversation.number + turn) % len(urls)]
                body = {
                    "model": model,
                    "messages": conversation.ask(turn),
                    "max_tokens": setup.reply_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                done = _ask(client, url, body, conversation.number, turn)
                conversation.add_reply(done.text)
                yield done


def _ask(client: httpx.Client, url: str, body: dict[str, Any], conversation: int, turn: int) -> HttpTurn:
    started_s = time.perf_counter()
    first_s, text = 0.0, ""
    usage: dict[str, Any] = {}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
            first_s = first_s or (time.perf_counter() - started_s if piece else 0.0)
            text += piece or ""
            usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    total_s = time.perf_counter() - started_s
    return HttpTurn(conversation, turn, usage["prompt_tokens"], cached, first_s or total_s, total_s, text)
