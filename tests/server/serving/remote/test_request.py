"""A request that is followed over replicas: how often it is tried, what it waits for, and what the client is told."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from bough.errors import BoughError, EngineStuck, QueueFull, ShuttingDown, TimedOut, Unavailable
from bough.generate.request import Request
from bough.scheduling.job import RequestBegan
from bough.server.serving.remote import request as followed
from bough.server.serving.remote.replicas import Message, RemoteRequest, ReplicaLost, RequestAccepted
from bough.server.serving.remote.request import MOST_MOVES, FollowedRequest
from bough.tokens import Tokens
from bough.types import Chunk, Completion, Usage
from tests.waiting import BOUND_S

Part = Sequence[Message] | Exception | None  # None: nothing comes any more
DONE = Completion("ab", (1, 2), "stop")


class ScriptedReplicas:
    """What each try hears: the first of `tries` that is left, the last one again and again."""

    def __init__(self, *tries: Sequence[Part]) -> None:
        self._tries = list(tries)
        self.requests: list[RemoteRequest] = []

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        self.requests.append(request)
        for part in self._tries.pop(0) if len(self._tries) > 1 else self._tries[0]:
            if isinstance(part, Exception):
                raise part
            if part is None:
                await asyncio.Event().wait()
            else:
                yield list(part)


class Listener:
    """Notes what it is told; `over` is set when that was the last."""

    def __init__(self) -> None:
        self.text = ""
        self.outcome: Completion | BoughError | None = None
        self.over = asyncio.Event()

    def __call__(self, news: Message) -> None:
        if isinstance(news, Chunk):
            self.text += news.text
        elif isinstance(news, Completion | BoughError):
            self._end(news)

    def _end(self, outcome: Completion | BoughError) -> None:
        assert self.outcome is None, "a listener is told once that it is over"
        self.outcome = outcome
        self.over.set()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "LONGEST_MOVE_S", 0.001)
    monkeypatch.setattr(followed, "LATE_S", 0.05)


def follow(
    replicas: ScriptedReplicas, deadline_s: float = math.inf, clock: Callable[[], float] = time.monotonic
) -> Listener:
    async def run() -> Listener:
        listener = Listener()
        request = Request(Tokens.of((1, 2, 3)), deadline_s=deadline_s)
        running = FollowedRequest(replicas, RemoteRequest(request, "id"), listener, set(), clock)  # type: ignore[arg-type]
        running.submit()
        async with asyncio.timeout(BOUND_S):
            await listener.over.wait()
        return listener

    return asyncio.run(run())


def at(name: str, *messages: Message) -> list[Message]:
    return [RequestAccepted(name), *messages]


def test_a_full_replica_is_not_the_last_word_while_another_has_room() -> None:
    replicas = ScriptedReplicas(
        [at("replica-0", QueueFull(4))], [at("replica-1", Chunk("a", (1,)), Chunk("b", (2,)), DONE)]
    )
    listener = follow(replicas)
    assert (listener.outcome, listener.text) == (DONE, "ab")
    assert replicas.requests[1].avoid == {"replica-0"}


def test_when_all_replicas_are_full_the_client_is_told_at_once() -> None:
    replicas = ScriptedReplicas([at("replica-0", QueueFull(4))], [at("replica-1", QueueFull(4))])
    assert isinstance(follow(replicas).outcome, QueueFull)
    assert len(replicas.requests) == 3  # the third one came to a replica that had refused it


def test_an_answer_that_has_begun_waits_for_room_and_not_for_ever() -> None:
    begun = [at("replica-0", RequestBegan(Usage(), 0.0), Chunk("a", (1,))), ReplicaLost("killed")]
    full = [at("replica-1", QueueFull(4))]
    replicas = ScriptedReplicas(begun, full, full, full, [at("replica-1", Chunk("b", (2,)), DONE)])
    listener = follow(replicas)
    assert isinstance(listener.outcome, Completion) and listener.text == "ab"

    replicas = ScriptedReplicas(begun, full)
    assert isinstance(follow(replicas).outcome, QueueFull)
    assert len(replicas.requests) == 1 + MOST_MOVES


@pytest.mark.parametrize("refusal", [[at("replica-0", ShuttingDown("it ends"))], [ReplicaLost("it had gone")]])
def test_replicas_that_end_are_not_asked_for_ever(refusal: Any) -> None:
    replicas = ScriptedReplicas(refusal)
    assert isinstance(follow(replicas).outcome, Unavailable)
    assert len(replicas.requests) == 1 + MOST_MOVES
    assert len({each.request_id for each in replicas.requests}) == 1 + MOST_MOVES  # each try is one of its own


def test_an_answer_goes_on_elsewhere_when_its_engine_is_stuck() -> None:
    stuck = at("replica-0", Chunk("a", (1,)), EngineStuck("a step takes too long"))
    replicas = ScriptedReplicas([stuck], [at("replica-1", Chunk("b", (2,)), DONE)])
    listener = follow(replicas)
    assert isinstance(listener.outcome, Completion) and listener.text == "ab"


def test_a_request_that_leaves_two_engines_stuck_is_refused() -> None:
    stuck = [[at(name, EngineStuck("a step takes too long"))] for name in ("replica-0", "replica-1", "replica-2")]
    replicas = ScriptedReplicas(*stuck)
    assert "lost with 2 replicas (replica-0 and replica-1)" in str(follow(replicas).outcome)


def test_the_only_engine_that_is_stuck_is_named_as_without_replicas() -> None:
    replicas = ScriptedReplicas([at("replica-0", EngineStuck("a step takes too long"))])
    assert isinstance(follow(replicas).outcome, EngineStuck)


@pytest.mark.parametrize("silence", [[None], [at("replica-0"), None]], ids=["no replica", "no answer"])
def test_a_request_that_nobody_answers_ends_after_its_deadline(silence: Any) -> None:
    listener = follow(ScriptedReplicas(silence), time.monotonic() + 0.1)
    assert isinstance(listener.outcome, TimedOut)


def test_a_deadline_that_passes_between_two_tries_ends_the_request() -> None:
    replicas = ScriptedReplicas([ReplicaLost("it had gone")])

    def clock() -> float:
        return 10.0 * len(replicas.requests)

    assert isinstance(follow(replicas, BOUND_S, clock).outcome, TimedOut)
    assert len(replicas.requests) == BOUND_S / 10
