"""Requests that do not end by themselves within a test, and a way to know that one is under way."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from bough import Runner
from tests.waiting import wait_until

PROMPT = list(range(3, 90))
ENDLESS: Any = {"max_tokens": 30_000, "ignore_eos": True}  # no test lasts so long


def watch_steps(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set by the next decode step: then a request has a lane, and its prompt is computed."""
    engine, has_stepped = runner.runtime.engine, threading.Event()
    step = engine.step

    def watched(lanes: Any, ids: Any) -> Any:
        has_stepped.set()
        return step(lanes, ids)

    monkeypatch.setattr(engine, "step", watched)
    return has_stepped


def hold_until_queued(runner: Runner, number: int) -> Future[None]:
    """Let the engine's thread wait until so many requests are queued, so that it sees all of them at once."""
    worker = runner.runtime.worker
    return worker.call(lambda: wait_until(lambda: worker.num_waiting >= number))


def count_cached(runner: Runner, prompt: list[int] = PROMPT) -> int:
    """How many tokens of the prompt need not be computed again."""
    return runner.generate(prompt, max_tokens=1).usage.cached_tokens
