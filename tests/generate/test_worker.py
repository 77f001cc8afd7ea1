"""The engine's thread: hand-over, bounds, calls between turns, a step that does not end, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from bough.errors import EngineError, EngineStuck, QueueFull, ShuttingDown
from bough.generate.job import Job
from bough.generate.request import Request
from bough.generate.worker import Limits, Worker
from bough.turns import Turns
from bough.types import SamplingParams
from tests.generate.concert import Client, Concert

BOUND_S = 30


class Stage:
    """A concert with a worker, and an engine that can be made to wait."""

    def __init__(self, **limits: float) -> None:
        self.concert = Concert(lanes=2)
        self.goes_on = threading.Event()
        self.goes_on.set()
        evaluate = self.concert.engine.evaluate

        def slowly(lane, ids):  # type: ignore[no-untyped-def]
            assert self.goes_on.wait(BOUND_S)
            return evaluate(lane, ids)

        self.concert.engine.evaluate = slowly  # type: ignore[method-assign]
        self.worker = Worker(
            self.concert.scheduler,
            Turns(),
            Limits(**limits),  # type: ignore[arg-type]
            take_stats=lambda: dict(self.concert.cache.stats()),
            on_idle=self.concert.cache.expire,
        )

    def submit(self, first: int, **params: object) -> Client:
        client = Client()
        request = Request([first, 2, 3], SamplingParams(max_tokens=4, **params), is_cancelled=lambda: client.is_gone)  # type: ignore[arg-type]
        self.worker.submit(Job(self.concert.prepare(request), client))
        return client


def wait_until(holds) -> None:  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline_s, "this took too long"
        time.sleep(0.005)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(queue=2)
    yield made
    made.goes_on.set()
    made.worker.close()


def test_requests_from_any_thread_are_served(stage: Stage) -> None:
    clients = [stage.submit(1), stage.submit(2)]
    wait_until(lambda: all(client.is_done for client in clients))
    assert [client.tokens for client in clients] == [stage.concert.alone([first, 2, 3]) for first in (1, 2)]


def test_more_than_may_wait_are_refused_with_their_number(stage: Stage) -> None:
    stage.goes_on.clear()
    clients = [stage.submit(first) for first in range(2)]
    wait_until(lambda: stage.worker.num_running)
    with pytest.raises(QueueFull, match="waiting already"):
        clients.extend(stage.submit(first) for first in range(2, 9))

    stage.goes_on.set()
    wait_until(lambda: all(client.is_done for client in clients))
    assert all(client.completion for client in clients)


def test_a_call_runs_on_the_engine_thread_and_its_error_comes_back(stage: Stage) -> None:
    assert stage.worker.call(lambda: threading.current_thread().name).result(BOUND_S) == "bough-engine"
    with pytest.raises(ZeroDivisionError):
        stage.worker.call(lambda: 1 // 0).result(BOUND_S)
    assert stage.worker.snapshot()["queue"] == 0


def test_a_mistake_of_ours_ends_its_requests_and_not_the_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(stage.concert.scheduler, "_prefill", lambda: 1 // 0)
        client = stage.submit(1)
        wait_until(lambda: client.is_done)
    assert isinstance(client.error, EngineError) and "ZeroDivisionError" in str(client.error)

    again = stage.submit(1)
    wait_until(lambda: again.is_done)
    assert again.completion


def test_requests_of_a_step_that_does_not_end_are_given_up_and_the_next_served_when_it_ends() -> None:
    stage = Stage(stuck_s=0.2)
    stage.goes_on.clear()
    client = stage.submit(1)
    wait_until(lambda: client.is_done)
    assert isinstance(client.error, EngineStuck) and stage.worker.is_stuck
    with pytest.raises(EngineStuck):
        stage.submit(2)

    stage.goes_on.set()
    wait_until(lambda: not stage.worker.is_stuck)
    again = stage.submit(1)
    wait_until(lambda: again.is_done)
    assert again.tokens == stage.concert.alone([1, 2, 3])
    stage.worker.close()


def test_closing_ends_what_runs_keeps_its_work_and_takes_nothing_new(stage: Stage) -> None:
    stage.goes_on.clear()
    client = stage.submit(1)
    wait_until(lambda: stage.worker.num_running)
    closing = threading.Thread(target=stage.worker.close)
    closing.start()
    stage.goes_on.set()
    closing.join(BOUND_S)

    assert isinstance(client.error, ShuttingDown) or client.completion
    assert not any(slot.is_busy for slot in stage.concert.cache.slots)
    for hand_over in (lambda: stage.submit(2), lambda: stage.worker.call(int)):
        with pytest.raises(ShuttingDown):
            hand_over()
