"""Threads and coroutines of the library, against HTTP clients of a server of the same model.

All ask the same prompts: a system prompt that they share, and a message of their own. Every round begins with a tree that
has the system prompt alone, so that all compute the same. The library and the server are never loaded at the same time.
They take turns, in blocks whose order alternates, and so do threads and coroutines inside a block.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httpx

from bough.bench.server import serving
from bough.bench.workload import words
from bough.errors import BoughError
from bough.runner import Runner, load
from bough.types import Completion, Message, SamplingParams

Way = Literal["threads", "coroutines", "http"]
WAYS: tuple[Way, ...] = ("threads", "coroutines", "http")
_ANSWER_S = 600.0


@dataclass(frozen=True)
class TogetherSetup:
    """How many ask at once, on how many lanes, and for how much. Each way has `blocks` × `rounds` rounds."""

    clients: int = 12
    lanes: int = 8
    tokens: int = 64
    system_words: int = 300
    message_words: int = 40
    rounds: int = 3
    blocks: int = 2

    @property
    def system(self) -> Message:
        return {"role": "system", "content": words(self.system_words, "library")}

    @property
    def prompts(self) -> list[list[Message]]:
        texts = [words(self.message_words, f"client {number}") for number in range(self.clients)]
        return [[self.system, {"role": "user", "content": text}] for text in texts]

    @property
    def num_rounds(self) -> int:
        """The rounds of all ways together."""
        return len(WAYS) * self.blocks * self.rounds


@dataclass(frozen=True)
class TimedAnswer:
    """One answer, and what it took. `error` is empty unless the request failed."""

    text: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class LibraryRound:
    """The answers to all prompts, and the seconds until the last one came."""

    way: Way
    seconds: float
    answers: list[TimedAnswer]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    @property
    def computed_tokens(self) -> int:
        return sum(answer.prompt_tokens - answer.cached_tokens for answer in self.answers)


@dataclass(frozen=True)
class WayFigures:
    """The rounds of one way: the median, the lowest and the highest rate; computed prompt tokens of a round, the median."""

    tokens_per_s: float
    lowest: float
    highest: float
    computed_tokens: float
    errors: list[str]

    @classmethod
    def of(cls, rounds: Sequence[LibraryRound]) -> WayFigures:
        rates = [round(each.tokens_per_s, 1) for each in rounds]
        computed = statistics.median(each.computed_tokens for each in rounds)
        errors = [error for each in rounds for error in each.errors]
        return cls(round(statistics.median(rates), 1), min(rates), max(rates), computed, errors)


def count_equal_answers(rounds: Sequence[LibraryRound]) -> int:
    """To how many prompts every round has the same answer."""
    texts = [[answer.text for answer in each.answers] for each in rounds]
    return sum(len(set(of_prompt)) == 1 for of_prompt in zip(*texts, strict=True))


def measure_together(model: str | None, setup: TogetherSetup) -> Iterator[LibraryRound]:
    """Run all rounds. A request that fails ends nothing; its round has the error."""
    for block in range(setup.blocks):
        parts = (_measure_library, _measure_server)
        for part in parts if block % 2 == 0 else reversed(parts):
            yield from part(model, setup)


def _measure_library(model: str | None, setup: TogetherSetup) -> Iterator[LibraryRound]:
    with load(model, disk=0, lanes=setup.lanes) as runner:
        params = SamplingParams(max_tokens=setup.tokens, ignore_eos=True)
        ways: dict[Way, Callable[[], list[TimedAnswer]]] = {
            "threads": lambda: _ask_in_threads(partial(_ask_runner, runner, params), setup.prompts),
            "coroutines": lambda: asyncio.run(_ask_in_tasks(runner, params, setup.prompts)),
        }

        def reset() -> None:
            runner.cache.clear()
            runner.warm([setup.system])

        yield from _time_rounds(ways, setup.rounds, reset)


def _measure_server(model: str | None, setup: TogetherSetup) -> Iterator[LibraryRound]:
    with (
        serving(model, "--disk", "0", "--lanes", str(setup.lanes)) as url,
        httpx.Client(base_url=url, timeout=_ANSWER_S) as client,
    ):
        name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": name, "max_tokens": setup.tokens, "temperature": 0, "ignore_eos": True}
        ask = partial(_ask_server, client, body)

        def reset() -> None:
            client.delete("/api/cache").raise_for_status()
            client.post("/api/cache/warm", json={"model": name, "messages": [setup.system]}).raise_for_status()

        yield from _time_rounds({"http": lambda: _ask_in_threads(ask, setup.prompts)}, setup.rounds, reset)


def _time_rounds(
    ways: dict[Way, Callable[[], list[TimedAnswer]]], num_rounds: int, reset: Callable[[], None]
) -> Iterator[LibraryRound]:
    """Each way in each round, in an order that alternates.

    A round before the first is not counted: it chooses kernels and opens connections.
    """
    for number in range(-1, num_rounds):
        names = list(ways)
        for way in names if number % 2 == 0 else reversed(names):
            reset()
            started_s = time.perf_counter()
            answers = ways[way]()
            if number >= 0:
                yield LibraryRound(way, time.perf_counter() - started_s, answers)


def _ask_in_threads(ask: Callable[[list[Message]], TimedAnswer], prompts: Sequence[list[Message]]) -> list[TimedAnswer]:
    def attempt(prompt: list[Message]) -> TimedAnswer:
        try:
            return ask(prompt)
        except (BoughError, httpx.HTTPError) as error:
            return TimedAnswer(error=f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(attempt, prompts))


async def _ask_in_tasks(runner: Runner, params: SamplingParams, prompts: Sequence[list[Message]]) -> list[TimedAnswer]:
    async def attempt(prompt: list[Message]) -> TimedAnswer:
        try:
            return _as_answer(await runner.agenerate(prompt, params))
        except BoughError as error:
            return TimedAnswer(error=f"{type(error).__name__}: {error}")

    return list(await asyncio.gather(*map(attempt, prompts)))


def _ask_runner(runner: Runner, params: SamplingParams, prompt: list[Message]) -> TimedAnswer:
    return _as_answer(runner.generate(prompt, params))


def _as_answer(completion: Completion) -> TimedAnswer:
    usage = completion.usage
    return TimedAnswer(completion.text, usage.completion_tokens, usage.prompt_tokens, usage.cached_tokens)


def _ask_server(client: httpx.Client, body: dict[str, Any], prompt: list[Message]) -> TimedAnswer:
    told = client.post("/v1/chat/completions", json=body | {"messages": prompt}).raise_for_status().json()
    usage, text = told["usage"], told["choices"][0]["message"]["content"] or ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return TimedAnswer(text, usage["completion_tokens"], usage["prompt_tokens"], cached)
