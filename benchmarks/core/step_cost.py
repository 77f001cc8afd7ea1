"""The host cost of a decode step: what the scheduler and everything above the engine take for one token of every lane.

The engine computes nothing, and the time that it takes for that is subtracted. Requests are greedy, or sample, or sample
with all penalties, half of them over the whole context and half over the last 64 tokens, and look for several stop strings.
All look for loops once in a batch of steps, and stream to a listener that puts each piece into a queue.

Between two steps the host is idle for some milliseconds, as it is while a device computes: then a step costs twice to
three times as much as one that follows the last at once, because the processor has forgotten what it needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from benchmarks.null_engine import VOCAB_SIZE, NullEngine, NullVocabulary
from bough.cache.prefix_cache import PrefixCache
from bough.cache.tree.state import Lane
from bough.errors import BoughError
from bough.generate.generation import ChunkSize
from bough.generate.loops import CHECK_EVERY, MIN_TOKENS
from bough.generate.request import Request
from bough.scheduling.job import Job, RequestNews
from bough.scheduling.scheduler import Scheduler
from bough.tokens import Tokens
from bough.types import Chunk, Draw, SampledToken, SamplingParams

PROMPT_TOKENS = 2000
BATCHES = 3
BATCH_STEPS = CHECK_EVERY
IDLE_S = 0.003
STOPS = ("\nUser:", "\nAssistant:", "<|end|>", "the end.")
_PENALTIES: dict[str, Any] = {"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2, "stop": STOPS}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9},
    "penalties and stops": {"temperature": 0.7, **_PENALTIES},
}
"""How the requests of a measurement choose their tokens, by name."""


class _TimedEngine(NullEngine):
    """Notes the processor time of its own steps and samples."""

    cpu_s = 0.0

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[int]:
        started_s = time.thread_time()
        logits = super().step(lanes, ids)
        self.cpu_s += time.thread_time() - started_s
        return logits

    def sample(self, logits: Sequence[int], draws: Sequence[Draw]) -> list[SampledToken]:
        started_s = time.thread_time()
        sampled = super().sample(logits, draws)
        self.cpu_s += time.thread_time() - started_s
        return sampled


def _hear(number: int, pieces: SimpleQueue[tuple[int, Chunk]], news: RequestNews) -> None:
    """A listener that puts the number of the request and its pieces into a queue, as the server does."""
    if isinstance(news, Chunk):
        pieces.put((number, news))
    elif isinstance(news, BoughError):
        raise news


def measure_step_s(num_lanes: int, sampling: str = "greedy", idle_s: float = IDLE_S) -> float:
    """Processor seconds for one step of all lanes: the mean of a batch of steps, and the lowest of several batches.

    Whatever else the machine does only adds to it.
    """
    engine = _TimedEngine()
    scheduler = Scheduler(engine, _open_cache(engine, num_lanes), ChunkSize(PROMPT_TOKENS), time.monotonic)
    pieces: SimpleQueue[tuple[int, Chunk]] = SimpleQueue()
    for job in _prepare(engine, num_lanes, SAMPLING[sampling], pieces):
        scheduler.add(job)
    while len(scheduler.running) < num_lanes or not all(job.is_decoding for job in scheduler.running):
        scheduler.turn()
    for _ in range(MIN_TOKENS):  # shorter answers are not looked at for loops
        scheduler.turn()
    _empty(pieces)
    batches = []
    for _ in range(BATCHES):
        engine.cpu_s = 0.0
        batches.append(_time_batch(scheduler, idle_s) - engine.cpu_s)
        assert pieces.qsize() == BATCH_STEPS * num_lanes, "a request has ended"
        _empty(pieces)
    return min(batches) / BATCH_STEPS


def _open_cache(engine: NullEngine, num_lanes: int) -> PrefixCache:
    return PrefixCache(engine, [engine.make_lane() for _ in range(num_lanes)])


def _prepare(
    engine: NullEngine, num_lanes: int, sampling: dict[str, Any], pieces: SimpleQueue[tuple[int, Chunk]]
) -> Iterator[Job]:
    """Requests whose prompts share nothing."""
    chance, vocabulary = random.Random(4), NullVocabulary()
    for number in range(num_lanes):
        params = SamplingParams(repeat_last_n=-1 if number % 2 else 64, **sampling)
        ids = [number, *(chance.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS - 1))]
        request = Request(Tokens.of(ids), params, seed=number)
        yield Job(engine, request, vocabulary, None, time.monotonic, partial(_hear, number, pieces))


def _time_batch(scheduler: Scheduler, idle_s: float) -> float:
    """Processor seconds for a batch of steps, those of the engine included."""
    seconds = 0.0
    for _ in range(BATCH_STEPS):
        time.sleep(idle_s)
        started_s = time.thread_time()
        scheduler.turn()
        seconds += time.thread_time() - started_s
    return seconds


def _empty(pieces: SimpleQueue[tuple[int, Chunk]]) -> None:
    for _ in range(pieces.qsize()):
        pieces.get()
