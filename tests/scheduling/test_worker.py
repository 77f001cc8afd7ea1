"""The engine's thread: hand-over, bounds, calls between turns, a step that does not end, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bough.cache.admin.stats import stats
from bough.cache.steps import Steps
from bough.errors import BoughError, EngineError, EngineStuck, QueueFull, ShuttingDown
from bough.generate.request import Request
from bough.scheduling.worker import Limits, Worker
from bough.tokens import Tokens
from bough.types import Chunk, SamplingParams
from tests.scheduling.concert import Client, Concert
from tests.waiting import BOUND_S, WatchedLock, wait_until

STUCK_S = 10_000.0  # no machine is so slow: a step takes too long only where a test lets time pass


class Stage:
    """A concert with a worker, and an engine that can be made to wait. Its clock goes on by itself and by `pass_time`."""

    def __init__(self, **limits: float) -> None:
        self.concert = Concert(lanes=2)
        self.goes_on, self.is_held = threading.Event(), threading.Event()
        self.goes_on.set()
        self._passed_s = 0.0
        self._has_watched = threading.Event()
        evaluate = self.concert.engine.evaluate

        def slowly(lane, ids):  # type: ignore[no-untyped-def]
            if not self.goes_on.is_set():
                self.is_held.set()
            assert self.goes_on.wait(BOUND_S)
            return evaluate(lane, ids)

        self.concert.engine.evaluate = slowly  # type: ignore[method-assign]
        self.worker = Worker(
            self.concert.scheduler,
            Limits(stuck_s=STUCK_S, **limits),  # type: ignore[arg-type]
            take_stats=lambda: dict(stats(self.concert.cache.forest, self.concert.cache.residency)),
            on_idle=self.concert.cache.residency.expiry.expire,
            clock=self._clock,
        )

    def _clock(self) -> float:
        now_s = time.monotonic() + self._passed_s
        if threading.current_thread().name == "bough-watchdog":
            self._has_watched.set()
        return now_s

    def pass_time(self, seconds: float) -> None:
        """Let time pass in a step that is under way, and the watchdog see it."""
        self._passed_s += seconds
        self._has_watched.clear()
        assert self._has_watched.wait(BOUND_S)

    def stick(self) -> None:
        """Let the step that is held take too long."""
        assert self.is_held.wait(BOUND_S)
        self.pass_time(2 * STUCK_S)

    def submit(self, first: int, tenant: str = "", max_tokens: int = 4, **params: object) -> Client:
        client = Client()
        wanted = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = Request(Tokens.of([first, 2, 3]), wanted, tenant=tenant)
        self.worker.submit(self.concert.prepare(request, client, lambda: client.is_gone))
        self.concert.clients.append(client)
        return client


@contextmanager
def holding(worker: Worker) -> Iterator[None]:
    """Keep the engine's thread in a call until the end of the block: what is handed over inside is taken together."""
    has_begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        assert goes_on.wait(BOUND_S)

    held = worker.call(wait)
    assert has_begun.wait(BOUND_S)
    try:
        yield
    finally:
        goes_on.set()
        held.result(BOUND_S)


@pytest.fixture(autouse=True)
def quick_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks often, so that no test has to wait for it."""
    monkeypatch.setattr("bough.scheduling.worker._WATCH_S", 0.002)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(queue=2)
    yield made
    made.goes_on.set()
    made.worker.close()
    assert all(client.is_done and not client.mistakes for client in made.concert.clients)


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


def test_a_tenant_that_fills_the_queue_makes_way_for_others_and_keeps_what_runs() -> None:
    stage = Stage(queue=4)
    stage.goes_on.clear()
    greedy = [stage.submit(first, "greedy") for first in range(2)]
    wait_until(lambda: stage.worker.num_running)
    with pytest.raises(QueueFull):
        greedy.extend(stage.submit(first, "greedy") for first in range(2, 20))

    modest = [stage.submit(first, "modest") for first in (20, 21)]
    with pytest.raises(QueueFull):  # now both have as many places
        [stage.submit(first, "modest") for first in (22, 23, 24)]

    refused = [client for client in greedy if client.is_done]
    assert refused and all(isinstance(client.error, QueueFull) for client in refused)
    assert refused == greedy[-len(refused) :]  # the newest
    stage.goes_on.set()
    wait_until(lambda: all(client.is_done for client in [*greedy, *modest]))
    assert all(client.completion for client in [*greedy, *modest] if client not in refused)
    stage.worker.close()


def test_without_tenants_nobody_makes_way(stage: Stage) -> None:
    stage.goes_on.clear()
    clients = [stage.submit(0)]
    wait_until(lambda: stage.worker.num_running)
    with pytest.raises(QueueFull):
        clients.extend(stage.submit(first) for first in range(1, 9))

    assert not any(client.is_done for client in clients)


def test_a_call_runs_on_the_engine_thread_and_its_error_comes_back(stage: Stage) -> None:
    assert stage.worker.call(lambda: threading.current_thread().name).result(BOUND_S) == "bough-engine"
    with pytest.raises(ZeroDivisionError):
        stage.worker.call(lambda: 1 // 0).result(BOUND_S)
    assert stage.worker.snapshot()["queue"] == 0


def test_work_that_the_engine_thread_itself_asks_for_runs_at_once(stage: Stage) -> None:
    order: list[str] = []

    def note(name: str) -> Steps[str]:
        yield
        order.append(name)
        return name

    def outer() -> list[str]:
        results = [stage.worker.call(lambda: order.append("call")), stage.worker.run_in_slices(lambda: note("slices"))]
        order.append("outer")
        return [each.result(0) for each in results]

    assert stage.worker.call(outer).result(BOUND_S) == [None, "slices"]
    assert order == ["call", "slices", "outer"]


def test_a_call_finds_requests_ended_that_were_cancelled_before_it_was_made(stage: Stage) -> None:
    stage.goes_on.clear()
    leaving, staying = stage.submit(1, max_tokens=4), stage.submit(2, max_tokens=4)
    wait_until(lambda: stage.worker.num_running == 2)
    leaving.is_gone = True
    found = stage.worker.call(lambda: (leaving.is_done, staying.is_done, stage.concert.cache.lanes.num_busy))
    stage.goes_on.set()

    assert found.result(BOUND_S) == (True, False, 1)
    wait_until(lambda: staying.is_done)
    assert leaving.completion is not None and leaving.completion.finish_reason == "cancelled"
    assert staying.tokens == stage.concert.alone([2, 2, 3])


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
    stage = Stage()
    stage.goes_on.clear()
    client = stage.submit(1)
    stage.stick()
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
    assert not any(slot.is_busy for slot in stage.concert.cache.lanes.slots)
    for hand_over in (lambda: stage.submit(2), lambda: stage.worker.call(int)):
        with pytest.raises(ShuttingDown):
            hand_over()


def test_calls_behind_a_step_that_does_not_end_are_given_up_and_no_others_taken() -> None:
    stage = Stage()
    stage.goes_on.clear()
    stage.submit(1)
    assert stage.is_held.wait(BOUND_S)
    behind = stage.worker.call(int)
    stage.stick()
    with pytest.raises(EngineStuck):
        behind.result(BOUND_S)
    with pytest.raises(EngineStuck):
        stage.worker.call(int)

    stage.goes_on.set()
    wait_until(lambda: not stage.worker.is_stuck)
    assert stage.worker.call(lambda: 7).result(BOUND_S) == 7
    stage.worker.close()


def test_closing_does_not_wait_for_a_step_that_does_not_end() -> None:
    stage = Stage()
    stage.goes_on.clear()
    stage.submit(1)
    stage.stick()

    with pytest.raises(EngineStuck):
        stage.worker.close()

    stage.goes_on.set()
    wait_until(lambda: not any(slot.is_busy for slot in stage.concert.cache.lanes.slots))
    wait_until(lambda: not stage.worker.is_stuck)
    stage.worker.close()


def test_many_short_calls_are_not_taken_for_one_step_that_does_not_end() -> None:
    stage = Stage()
    calls = [stage.worker.call(lambda: stage.pass_time(0.4 * STUCK_S)) for _ in range(5)]
    client = stage.submit(1)

    for call in calls:
        call.result(BOUND_S)
    wait_until(lambda: client.is_done)

    assert client.completion
    stage.worker.close()


def test_a_request_behind_a_long_call_counts_as_waiting_and_is_given_up_with_it() -> None:
    stage = Stage()
    goes_on, has_begun = threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return goes_on.wait(BOUND_S)

    with holding(stage.worker):  # so that both are handed over together
        call = stage.worker.call(wait)
        client = stage.submit(1)
    assert has_begun.wait(BOUND_S)
    assert stage.worker.num_waiting == 1
    stage.pass_time(2 * STUCK_S)
    wait_until(lambda: client.is_done)

    assert isinstance(client.error, EngineStuck)
    goes_on.set()
    assert call.result(BOUND_S)
    stage.worker.close()


def test_a_mistake_while_requests_are_ended_does_not_end_the_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(stage.concert.scheduler, "_prefill", lambda: 1 // 0)
        broken.setattr(stage.concert.cache.residency.evictor, "forget_if_empty", lambda trie: 1 // 0)
        client = stage.submit(1)
        wait_until(lambda: client.is_done)
        wait_until(lambda: not stage.worker.num_running)

    again = stage.submit(1)
    wait_until(lambda: again.is_done)
    assert again.completion


def test_a_listener_hears_nothing_after_its_request_was_given_up() -> None:
    concert, heard = Concert(), []
    has_begun, goes_on = threading.Event(), threading.Event()

    class Slow(Client):
        def on_chunk(self, chunk: Chunk) -> None:
            has_begun.set()
            assert goes_on.wait(BOUND_S)
            heard.append("chunk")

        def on_error(self, error: BoughError) -> None:
            heard.append("error")

    job = concert.prepare(Request(Tokens.of([1]), SamplingParams()), Slow())
    ending = job._ending = WatchedLock()  # type: ignore[assignment]
    delivering = threading.Thread(target=job.deliver, args=(Chunk("a", (1,)),))
    delivering.start()
    assert has_begun.wait(BOUND_S)
    giving_up = threading.Thread(target=job.fail, args=(EngineStuck("it takes too long"),))
    giving_up.start()
    assert ending.is_awaited.wait(BOUND_S)
    goes_on.set()
    delivering.join(BOUND_S)
    giving_up.join(BOUND_S)
    job.deliver(Chunk("b", (2,)))

    assert heard == ["chunk", "error"]


def test_a_listener_that_fails_ends_its_own_request_alone(stage: Stage) -> None:
    class Broken(Client):
        def on_chunk(self, chunk: Chunk) -> None:
            raise RuntimeError("nobody listens any more")

    broken = Broken()
    with holding(stage.worker):  # so that both run together
        stage.worker.submit(stage.concert.prepare(Request(Tokens.of([9]), SamplingParams(max_tokens=4)), broken))
        other = stage.submit(1)
    wait_until(lambda: broken.is_done and other.is_done)

    assert isinstance(broken.error, EngineError) and "RuntimeError" in str(broken.error)
    assert other.tokens == stage.concert.alone([1, 2, 3])


def test_a_listener_that_fails_when_it_hears_the_end_keeps_nobody_else_from_hearing_theirs() -> None:
    class Broken(Client):
        def on_error(self, error: BoughError) -> None:
            raise RuntimeError("nobody listens any more")

    stage = Stage()
    stage.goes_on.clear()
    with holding(stage.worker):
        stage.worker.submit(stage.concert.prepare(Request(Tokens.of([9]), SamplingParams(max_tokens=4)), Broken()))
        others = [stage.submit(first) for first in range(3)]
    stage.stick()
    wait_until(lambda: all(other.is_done for other in others))

    assert all(isinstance(other.error, EngineStuck) for other in others)
    stage.goes_on.set()
    wait_until(lambda: not stage.worker.is_stuck)
    again = stage.submit(1)
    wait_until(lambda: again.is_done)
    assert again.completion
    stage.worker.close()


def test_a_request_that_is_cancelled_while_it_waits_hears_of_its_end_from_the_thread(stage: Stage) -> None:
    stage.goes_on.clear()
    running = [stage.submit(first) for first in range(2)]
    wait_until(lambda: stage.worker.num_running == 2)
    waiting = stage.submit(5)
    waiting.is_gone = True
    stage.goes_on.set()
    wait_until(lambda: waiting.is_done and all(client.is_done for client in running))

    assert waiting.completion is not None and waiting.completion.finish_reason == "cancelled"


def test_figures_are_taken_now_and_then_while_requests_run_and_are_right_when_none_does() -> None:
    concert, now, taken = Concert(lanes=2), [100.0], list[float]()
    turn = concert.scheduler.turn

    def take_stats() -> dict[str, object]:
        taken.append(now[0])
        return dict(stats(concert.cache.forest, concert.cache.residency))

    def slow_turn() -> None:
        now[0] += 0.2
        turn()

    concert.scheduler.turn = slow_turn  # type: ignore[method-assign]
    worker = Worker(concert.scheduler, Limits(), take_stats=take_stats, on_idle=lambda: False, clock=lambda: now[0])
    client = Client()
    with holding(worker):
        taken.clear()
        worker.submit(concert.prepare(Request(Tokens.of([1, 2, 3]), SamplingParams(max_tokens=16)), client))
    wait_until(lambda: client.is_done and worker.snapshot()["tokens"] == 18)
    worker.close()

    while_it_ran = sorted(set(taken))
    assert 3 <= len(while_it_ran) <= 2 + (now[0] - 100.0) / 0.5


def test_an_idle_worker_goes_on_tidying_until_nothing_is_left() -> None:
    concert, calls = Concert(lanes=2), list[int]()

    def tidy() -> bool:
        calls.append(1)
        return len(calls) < 5

    worker = Worker(concert.scheduler, Limits(), take_stats=dict, on_idle=tidy)
    worker.call(int).result(BOUND_S)
    wait_until(lambda: len(calls) >= 5)
    worker.close()

    assert len(calls) == 5
