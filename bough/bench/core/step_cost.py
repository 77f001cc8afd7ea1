"""The host cost of a decode step: what the scheduler and everything above the engine take for one token of every lane.

The engine computes nothing. Every request samples with all penalties, half of them over the whole context and half over the
last 64 tokens. It looks for several stop strings and, once in a batch of steps, for loops, and streams to a listener that
puts each piece into a queue.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from queue import SimpleQueue

from bough.bench.core.null_engine import VOCAB_SIZE, NullEngine, NullVocabulary
from bough.cache.prefix_cache import PrefixCache
from bough.errors import BoughError
from bough.generate.generation import ChunkSize, Generation
from bough.generate.job import Job
from bough.generate.loops import CHECK_EVERY, MIN_TOKENS
from bough.generate.request import Request
from bough.generate.scheduler import Scheduler
from bough.types import Chunk, Completion, SamplingParams, Usage

PROMPT_TOKENS = 2000
BATCHES = 20
BATCH_STEPS = CHECK_EVERY
STOPS = ("\nUser:", "\nAssistant:", "<|end|>", "the end.")


class _QueueListener:
    """Puts the number of the request and its pieces into a queue, as the server does."""

    def __init__(self, number: int, pieces: SimpleQueue[tuple[int, Chunk]]) -> None:
        self._number = number
        self._pieces = pieces

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: Usage) -> None:
        pass

    def on_chunk(self, chunk: Chunk) -> None:
        self._pieces.put((self._number, chunk))

    def on_end(self, completion: Completion) -> None:
        pass

    def on_error(self, error: BoughError) -> None:
        raise error


def measure_step_s(num_lanes: int) -> float:
    """Processor seconds for one step of all lanes: the mean of a batch of steps, and the lowest of several batches.

    Whatever else the machine does only adds to it.
    """
    scheduler = Scheduler(engine := NullEngine(), _open_cache(engine, num_lanes), ChunkSize(PROMPT_TOKENS), time.monotonic)
    pieces: SimpleQueue[tuple[int, Chunk]] = SimpleQueue()
    for number, generation in enumerate(_prepare(engine, num_lanes)):
        scheduler.add(Job(generation, _QueueListener(number, pieces)))
    while len(scheduler.running) < num_lanes or not all(job.is_decoding for job in scheduler.running):
        scheduler.turn()
    for _ in range(MIN_TOKENS):  # shorter answers are not looked at for loops
        scheduler.turn()
    return min(_time_batch(scheduler, pieces, num_lanes) for _ in range(BATCHES))


def _open_cache(engine: NullEngine, num_lanes: int) -> PrefixCache:
    return PrefixCache(engine, [engine.make_lane() for _ in range(num_lanes)])


def _prepare(engine: NullEngine, num_lanes: int) -> Iterator[Generation]:
    """Requests whose prompts share nothing."""
    chance, vocabulary = random.Random(4), NullVocabulary()
    for number in range(num_lanes):
        params = SamplingParams(
            temperature=0.7,
            repeat_penalty=1.1,
            repeat_last_n=-1 if number % 2 else 64,
            presence_penalty=0.2,
            frequency_penalty=0.2,
            stop=STOPS,
        )
        ids = [number, *(chance.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS - 1))]
        yield Generation(engine, Request(ids, params, seed=number), vocabulary, None, time.monotonic)


def _time_batch(scheduler: Scheduler, pieces: SimpleQueue[tuple[int, Chunk]], num_lanes: int) -> float:
    for _ in range(pieces.qsize()):
        pieces.get()
    started_s = time.process_time()
    for _ in range(BATCH_STEPS):
        scheduler.turn()
    seconds = time.process_time() - started_s
    assert pieces.qsize() == BATCH_STEPS * num_lanes, "a request has ended"
    return seconds / BATCH_STEPS
