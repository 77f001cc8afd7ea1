"""`bough bench lanes`: the decode speed of several lanes together, against one lane alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.bench.workload import random_prompts
from bough.errors import BoughError
from bough.generate.generation import ChunkSize
from bough.models.prompts import Encoded
from bough.runtime import Runtime
from bough.scheduling.job import Job
from bough.scheduling.scheduler import Scheduler
from bough.types import Chunk, Completion, SamplingParams, Usage


@dataclass(frozen=True)
class LaneFigures:
    """For each number of lanes: the median time of a step, tokens per second, and its ratio to one lane.

    `agreement` is the share of greedily generated tokens that are equal when the conversations run one by one.
    """

    context_tokens: int
    step_ms: dict[int, float]
    tokens_per_s: dict[int, float]
    ratio: dict[int, float]
    agreement: float
    setup: dict[str, str] = field(default_factory=dict)


class _TokenListener:
    """Collects the tokens of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: Usage) -> None:
        pass

    def on_chunk(self, chunk: Chunk) -> None:
        self.tokens += chunk.token_ids

    def on_end(self, completion: Completion) -> None:
        pass

    def on_error(self, error: BoughError) -> None:
        raise error


def measure_lanes(runtime: Runtime, counts: Sequence[int], context_tokens: int, steps: int = 24) -> LaneFigures:
    """Generate `steps` tokens greedily for prompts that share nothing, with each number of lanes in `counts`."""
    prompts = random_prompts(range(runtime.engine.vocab_size), context_tokens, max(counts))
    _run(runtime, prompts[:1], steps)  # the first run chooses kernels and allocates memory
    times: dict[int, float] = {}
    answers: dict[int, list[list[int]]] = {}
    for count in sorted({1, *counts}):
        times[count], answers[count] = _run(runtime, prompts[:count], steps)
    alone = [_run(runtime, [prompt], steps)[1][0] for prompt in prompts]
    rate = {count: count / times[count] for count in times}
    return LaneFigures(
        context_tokens,
        {count: round(1000 * seconds, 2) for count, seconds in times.items()},
        {count: round(each, 1) for count, each in rate.items()},
        {count: round(each / rate[1], 2) for count, each in rate.items()},
        round(_agreement(answers[max(counts)], alone), 4),
        runtime.engine.describe(),
    )


def _run(runtime: Runtime, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[list[int]]]:
    """The median time of a step in which all prompts decode, and the generated tokens.

    A first pass puts the prompts into the tree. In the second, each prompt has only one token left to evaluate.
    """
    size = ChunkSize(largest=runtime.engine.max_chunk_tokens)
    scheduler = Scheduler(runtime.engine, runtime.prefix_cache, size, time.monotonic)
    for max_tokens in (0, steps + len(prompts)):
        listeners = [_TokenListener() for _ in prompts]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        for ids, listener in zip(prompts, listeners, strict=True):
            scheduler.add(Job(runtime.prepare(Encoded(ids), params), listener))
        times = list(_time_turns(scheduler, runtime, len(prompts)))
    return statistics.median(times), [listener.tokens[:steps] for listener in listeners]


def _time_turns(scheduler: Scheduler, runtime: Runtime, count: int) -> Iterator[float]:
    """Run the scheduler to the end. Yields the seconds of each turn in which exactly `count` requests decode."""
    while scheduler.has_work:
        is_full = len(scheduler.running) == count and all(job.is_decoding for job in scheduler.running)
        runtime.engine.synchronize()
        started_s = time.perf_counter()
        scheduler.turn()
        runtime.engine.synchronize()
        if is_full:
            yield time.perf_counter() - started_s


def _agreement(together: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> float:
    pairs = [pair for ours, theirs in zip(together, alone, strict=False) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
