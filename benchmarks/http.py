"""`python -m benchmarks http`: the switching workload over HTTP, against a server with the tree and others.

Those are a server without a cache; or several replicas on Ray, and as many servers that know nothing of each other.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import httpx
import typer

from bough.bench.server import StreamedRequest, serving
from bough.bench.workload import ScriptedChat, SwitchSetup
from bough.cli.bench import BenchReport, Json, Model
from bough.config import load_settings


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
                    "stream_options": {"include_usage": True},
                }
                done = _ask(client, url, body, conversation.number, turn)
                conversation.add_reply(done.text)
                yield done


def _ask(client: httpx.Client, url: str, body: dict[str, Any], conversation: int, turn: int) -> HttpTurn:
    found = StreamedRequest(client, f"{url}/v1/chat/completions", body).receive()
    assert found.prompt_tokens is not None and found.cached_tokens is not None
    counts = found.prompt_tokens, found.cached_tokens
    return HttpTurn(conversation, turn, *counts, found.first_s, found.last_s, found.text)


def http(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=2)] = 4,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    replicas: Annotated[int, typer.Option(min=0, help="Compare with so many on Ray, and with round robin.")] = 0,
    as_json: Json = False,
) -> None:
    """Conversations take turns over HTTP: a server with the tree, against one without a cache, or against replicas."""
    report, setup = (
        BenchReport("http", as_json),
        SwitchSetup(conversations, turns, system_words, message_words, reply_tokens),
    )
    figures, name = HttpFigures(), model or load_settings().model
    for servers in choose_servers(replicas):
        with report.counting(servers.name, conversations * turns) as count, serving_all(model, servers) as urls:
            figures.turns[servers.name] = []
            for turn in run_http(urls, name, setup):
                figures.turns[servers.name].append(turn)
                count()
    found = figures.as_dict()
    columns = ("server", "first token, median", "mean", "cached", "all turns")
    report.table("later turns over HTTP", columns, [_row(label, found[label]) for label in figures.turns])
    report.line(f"answers equal: {found['answers_equal']}")
    report.finish(found | {"setup": asdict(setup) | {"model": name}})


def _row(label: str, figures: dict[str, float]) -> tuple[str, ...]:
    return (
        label,
        f"{figures['later_first_token_ms']:,.0f} ms",
        f"{figures['later_first_token_mean_ms']:,.0f} ms",
        f"{figures['later_cached_share']:.1%}",
        f"{figures['total_s']:.1f} s",
    )
