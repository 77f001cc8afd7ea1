"""Batches of texts: which texts run together, that none waits for ever, and that a bad one fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from bough.engines.contract import EngineInfo
from bough.errors import BoughError, EngineError, EngineStuck, QueueFull, RequestCancelled, ShuttingDown
from bough.scheduling.encoder_scheduler import EncoderJob, EncoderScheduler
from bough.scheduling.worker import Limits, Worker
from bough.types import EncoderInput
from tests.waiting import BOUND_S

BAD = 13
NO_LIMITS = Limits()


class CountingEncoder:
    """Gives each text its sum and its length. A batch with the token `BAD` fails, and `fails_in` makes batches fail."""

    vocab_size = 100
    context_tokens = 512
    dimensions = 2
    has_host = False
    info = EngineInfo("fake", "Counting", "cpu", "float32")

    def __init__(self, max_batch_tokens: int = 64) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.batches: list[list[int]] = []  # of lengths
        self.before: Callable[[], None] = lambda: None
        self.largest_batch = 1_000

    def describe(self) -> dict[str, str]:
        return {}

    def encode(self, batch: Sequence[EncoderInput]) -> list[list[float]]:
        self.batches.append([len(text.ids) for text in batch])
        self.before()
        if len(batch) > self.largest_batch:
            raise MemoryError(f"{len(batch)} texts")
        if any(BAD in text.ids for text in batch):
            raise EngineError("a bad token")
        return [[float(sum(text.ids)), float(len(text.ids))] for text in batch]

    def close(self) -> None:
        pass


@dataclass
class Stage:
    """A scheduler over a counting engine, and what its listeners were told, by the name of the text."""

    engine: CountingEncoder = field(default_factory=CountingEncoder)
    told: dict[str, Sequence[float] | BoughError] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = EncoderScheduler(self.engine)

    def job(self, name: str, *ids: int, tenant: str = "") -> EncoderJob:
        def tell(result: Sequence[float] | BoughError) -> None:
            assert name not in self.told, f"{name} was told twice"
            self.told[name] = result

        return EncoderJob(EncoderInput(ids), tell, lambda: name in self.cancelled, tenant)

    def add(self, name: str, *ids: int) -> EncoderJob:
        job = self.job(name, *ids)
        self.scheduler.add(job)
        return job

    def run(self, most: int = 100) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.scheduler.turn()
        raise AssertionError(f"there is still work after {most} turns")


def test_a_turn_encodes_texts_of_similar_length_together():
    stage = Stage()
    for number, length in enumerate((5, 40, 6, 38, 5)):
        stage.add(str(number), *[1] * length)

    stage.scheduler.turn()

    assert stage.engine.batches == [[5, 5, 6]]
    assert stage.told == {"0": [5, 5], "2": [6, 6], "4": [5, 5]}
    stage.run()
    assert len(stage.told) == 5


def test_a_batch_has_no_more_tokens_with_padding_than_allowed():
    stage = Stage(CountingEncoder(max_batch_tokens=64))
    for number in range(20):
        stage.add(str(number), *[1] * (8 + number % 3))

    stage.run()

    assert all(max(batch) * len(batch) <= 64 for batch in stage.engine.batches)
    assert sum(map(len, stage.engine.batches)) == 20


def test_a_text_longer_than_a_batch_runs_alone():
    stage = Stage(CountingEncoder(max_batch_tokens=64))
    stage.add("long", *[1] * 200)
    stage.add("longer", *[1] * 201)

    stage.run()

    assert stage.engine.batches == [[200], [201]]


def test_an_engine_that_takes_no_batches_gets_one_text_at_a_time():
    stage = Stage(CountingEncoder(max_batch_tokens=0))
    for number in range(3):
        stage.add(str(number), 1, 2)

    stage.run()

    assert stage.engine.batches == [[2], [2], [2]]


def test_the_oldest_text_runs_in_every_turn_however_many_others_come():
    stage = Stage(CountingEncoder(max_batch_tokens=64))
    stage.add("short", 1)
    stage.add("long", *[1] * 60)
    for number in range(500):
        stage.add(str(number), 1)

    stage.scheduler.turn()
    stage.scheduler.turn()

    assert stage.told["long"] == [60, 60]


def test_a_bad_text_fails_alone():
    stage = Stage()
    for number in range(4):
        stage.add(str(number), 1, number)
    stage.add("bad", 1, BAD)
    stage.add("later", 1, 2, 3)

    stage.run()

    assert isinstance(stage.told.pop("bad"), EngineError)
    assert stage.told == {"0": [1, 2], "1": [2, 2], "2": [3, 2], "3": [4, 2], "later": [6, 3]}


def test_texts_of_a_batch_that_failed_run_one_in_a_turn_and_first():
    stage = Stage()
    stage.add("bad", BAD)
    stage.add("good", 1)
    stage.scheduler.turn()
    stage.add("new", 2)

    stage.scheduler.turn()
    stage.scheduler.turn()

    assert stage.engine.batches == [[1, 1], [1], [1]]
    assert set(stage.told) == {"bad", "good"}


def test_a_batch_without_memory_is_tried_text_by_text():
    stage = Stage()
    stage.engine.largest_batch = 1
    for number in range(3):
        stage.add(str(number), number)

    stage.run()

    assert stage.told == {"0": [0, 1], "1": [1, 1], "2": [2, 1]}


def test_a_cancelled_text_is_dropped_before_it_is_computed():
    stage = Stage()
    stage.add("gone", 1)
    stage.add("here", 2)
    stage.cancelled.add("gone")

    stage.run()

    assert isinstance(stage.told["gone"], RequestCancelled)
    assert stage.engine.batches == [[1]]


def test_a_text_that_is_cancelled_while_it_runs_keeps_its_result():
    stage = Stage()
    stage.add("late", 1)
    stage.engine.before = lambda: stage.cancelled.add("late")

    stage.run()

    assert stage.told["late"] == [1, 1]


def test_a_listener_that_raises_disturbs_no_other(caplog):
    stage = Stage()

    def fail(result: Sequence[float] | BoughError) -> None:
        raise RuntimeError("a mistake")

    stage.scheduler.add(EncoderJob(EncoderInput([1]), fail))
    stage.add("other", 2)

    stage.run()

    assert stage.told["other"] == [2, 1]
    assert "the listener of a text failed" in caplog.text


def test_a_mistake_of_ours_ends_the_texts_that_run(caplog):
    stage = Stage()
    stage.add("one", 1)

    def fail() -> None:
        raise ZeroDivisionError("a mistake")

    stage.engine.before = fail
    with pytest.raises(ZeroDivisionError):
        stage.scheduler.turn()
    stage.scheduler.fail_all(EngineError("the end"))

    assert isinstance(stage.told["one"], EngineError)
    assert not stage.scheduler.has_work


def make_worker(stage: Stage, limits: Limits = NO_LIMITS, clock: Callable[[], float] = time.monotonic) -> Worker:
    return Worker(stage.scheduler, limits, take_stats=dict, on_idle=lambda: False, clock=clock)


def test_a_worker_runs_texts_of_many_threads():
    stage = Stage()
    worker, ended = make_worker(stage), threading.Semaphore(0)

    def send(thread: int) -> None:
        for number in range(25):
            job = stage.job(f"{thread}-{number}", thread, number)
            tell = job.listener
            job.listener = lambda result, tell=tell: (tell(result), ended.release())
            worker.submit(job)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(20, 32)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert ended.acquire(timeout=BOUND_S)
    worker.close()

    assert all(
        stage.told[f"{thread}-{number}"] == [thread + number, 2] or number == BAD
        for thread in range(20, 32)
        for number in range(25)
    )
    assert sum(isinstance(each, EngineError) for each in stage.told.values()) == 12


def test_closing_a_worker_ends_the_texts_that_wait():
    stage, inside, go_on = Stage(CountingEncoder(0)), threading.Event(), threading.Event()
    stage.engine.before = lambda: (inside.set(), go_on.wait(BOUND_S))
    worker = make_worker(stage)
    worker.submit(stage.job("runs", 1))
    assert inside.wait(BOUND_S)
    worker.submit(stage.job("waits", 2))

    worker.close_soon()
    go_on.set()
    worker.close()

    assert stage.told["runs"] == [1, 1]
    assert isinstance(stage.told["waits"], ShuttingDown)


def test_a_full_queue_refuses_the_newest_text_of_the_busiest_tenant():
    stage, inside, go_on = Stage(CountingEncoder(0)), threading.Event(), threading.Event()
    stage.engine.before = lambda: (inside.set(), go_on.wait(BOUND_S))
    worker = make_worker(stage, Limits(queue=3))
    worker.submit(stage.job("runs", 1))
    assert inside.wait(BOUND_S)
    for number in range(3):
        worker.submit(stage.job(f"busy {number}", number, tenant="busy"))

    with pytest.raises(QueueFull):
        worker.submit(stage.job("too many", 9, tenant="busy"))
    worker.submit(stage.job("other", 5, tenant="other"))
    go_on.set()
    worker.call(lambda: None).result(BOUND_S)
    while worker.num_waiting or worker.num_running:
        worker.call(lambda: None).result(BOUND_S)
    worker.close()

    assert isinstance(stage.told["busy 2"], QueueFull)
    assert stage.told["other"] == [5, 1]


def test_a_stuck_batch_fails_its_texts_and_the_worker_goes_on():
    stage, inside, go_on, failed = Stage(), threading.Event(), threading.Event(), threading.Event()
    stage.engine.before = lambda: (inside.set(), go_on.wait(BOUND_S))
    now = [0.0]
    worker = make_worker(stage, Limits(stuck_s=0.05), lambda: now[0])
    job = stage.job("stuck", 1)
    tell = job.listener
    job.listener = lambda result: (tell(result), failed.set())
    worker.submit(job)
    assert inside.wait(BOUND_S)

    now[0] = 1.0
    assert failed.wait(BOUND_S)
    go_on.set()
    worker.close()

    assert isinstance(stage.told["stuck"], EngineStuck)
