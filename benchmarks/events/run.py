"""Rounds with and without readers of `/api/events`, in turns, on one server: decode speed and first tokens.

The server, the clients that stream and the readers are processes of their own. Both halves of a round ask the same of an
empty tree, so that they compute the same and the tree changes in the same way; their order alternates.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import httpx

from benchmarks.events.readers import ReaderFigures, readers
from benchmarks.streams.clients import ClientFigures, ClientSetup
from bough.bench.server import StreamedRequest, serving
from bough.bench.workload import words
from bough.errors import EngineError

_ANSWER_S = 600.0
_PROMPT_WORDS = 60


@dataclass(frozen=True)
class EventsSetup:
    """How many read, how many stream, and how much. `streams` are measured besides a single stream."""

    readers: int = 3
    streams: int = 8
    tokens: int = 128
    first_tokens: int = 8
    rounds: int = 12


@dataclass(frozen=True)
class Half:
    """What was measured with readers, or without: tokens a second of all streams together, and a median."""

    one_stream: float
    many_streams: float
    first_token_ms: float
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class EventRound:
    """Both halves of a round."""

    alone: Half
    watched: Half


@dataclass(frozen=True)
class Compared:
    """A figure without readers and with them, the medians; and the median of what the rounds' halves are to each other."""

    alone: float
    watched: float
    ratio: float

    @classmethod
    def of(cls, rounds: Sequence[EventRound], read: Callable[[Half], float]) -> Compared:
        ratios = [read(each.watched) / read(each.alone) for each in rounds]
        alone, watched = (statistics.median(map(read, halves)) for halves in _halves(rounds))
        return cls(round(alone, 2), round(watched, 2), round(statistics.median(ratios), 4))


def _halves(rounds: Sequence[EventRound]) -> tuple[list[Half], list[Half]]:
    return [each.alone for each in rounds], [each.watched for each in rounds]


@dataclass(frozen=True)
class EventsReport:
    """All rounds in a few figures. `bytes_per_s` is what one reader got."""

    one_stream: Compared
    many_streams: Compared
    first_token_ms: Compared
    bytes_per_s: float

    @classmethod
    def of(cls, rounds: Sequence[EventRound]) -> EventsReport:
        return cls(
            Compared.of(rounds, lambda half: half.one_stream),
            Compared.of(rounds, lambda half: half.many_streams),
            Compared.of(rounds, lambda half: half.first_token_ms),
            round(statistics.median(each.watched.bytes_per_s for each in rounds)),
        )


def measure_events(model: str | None, setup: EventsSetup) -> Iterator[EventRound]:
    """Run all rounds. The first one is not counted: it chooses kernels and opens connections."""
    with serving(model, "--disk", "0", "--lanes", str(setup.streams)) as url:
        port = int(url.rpartition(":")[2])
        with httpx.Client(base_url=url, timeout=_ANSWER_S) as client, readers(port, setup.readers) as reading:
            name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for number in range(-1, setup.rounds):
                halves: dict[bool, Half] = {}
                for is_watched in (number % 2 == 0, number % 2 != 0):
                    if is_watched:
                        reading.open()
                    half = _measure_half(client, ClientSetup(port, name, ignores_eos=True), setup, number)
                    halves[is_watched] = _with_bytes(half, reading.close()) if is_watched else half
                if number >= 0:
                    yield EventRound(halves[False], halves[True])


def _with_bytes(half: Half, figures: ReaderFigures) -> Half:
    return replace(half, bytes_per_s=figures.bytes_per_s)


def _measure_half(client: httpx.Client, asked: ClientSetup, setup: EventsSetup, number: int) -> Half:
    asked = replace(asked, num_tokens=setup.tokens, first_number=1000 * (number + 1))
    client.delete("/api/cache").raise_for_status()
    one = _stream(replace(asked, num_clients=1))
    client.delete("/api/cache").raise_for_status()
    many = _stream(replace(asked, num_clients=setup.streams))
    first = [_time_first_token(client, asked.model, f"{number} {each}") for each in range(setup.first_tokens)]
    return Half(one, many, 1000 * statistics.median(first))


def _stream(asked: ClientSetup) -> float:
    """Tokens a second of these clients, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.streams.clients", json.dumps(asdict(asked))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        raise EngineError(f"the clients that stream ended with {done.returncode}")
    figures = ClientFigures(**json.loads(done.stdout.splitlines()[-1]))
    if not figures.num_events or not figures.seconds:
        raise EngineError("a stream ended before the last one had begun: ask for more tokens")
    return figures.num_events / figures.seconds


def _time_first_token(client: httpx.Client, model: str, seed: str) -> float:
    """Seconds until the first token of the answer to a new prompt."""
    prompt = [{"role": "user", "content": words(_PROMPT_WORDS, seed)}]
    body = {"model": model, "messages": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return StreamedRequest(client, "/v1/chat/completions", body).receive().first_s
