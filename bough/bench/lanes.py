"""Many conversations at once: what a decode step of several lanes together gives, against one lane alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.bench.workload import random_prompts
from bough.errors import BoughError
from bough.generate.chunk_size import ChunkSize
from bough.generate.job import Job
from bough.generate.scheduler import Scheduler
from bough.models.prompts import Encoded
from bough.runner import Runner
from bough.types import Chunk, Completion, SamplingParams, Usage


@dataclass(frozen=True)
class LaneFigures:
    """One row for each number of lanes: milliseconds of a step (median), tokens a second, and that against one lane.

    `agreement` is the share of the tokens, generated greedily, that are those of the same conversations run one by one.
    """

    context_tokens: int
    step_ms: dict[int, float]
    tokens_per_s: dict[int, float]
    ratio: dict[int, float]
    agreement: float
    setup: dict[str, str] = field(default_factory=dict)


class _Ear:
    """Keeps the tokens of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_chunk(self, chunk: Chunk) -> None:
        self.tokens += chunk.token_ids

    def on_end(self, completion: Completion) -> None:
        pass

    def on_error(self, error: BoughError) -> None:
        raise error


def measure_lanes(runner: Runner, counts: Sequence[int], context_tokens: int, steps: int = 24) -> LaneFigures:
    """Greedy answers of `steps` tokens to prompts that share nothing, so many at once as `counts` says."""
    prompts = random_prompts(range(runner.engine.vocab_size), context_tokens, max(counts))
    _run(runner, prompts[:1], steps)  # kernels are chosen and memory is taken on first use
    times: dict[int, float] = {}
    answers: dict[int, list[list[int]]] = {}
    for count in sorted({1, *counts}):
        times[count], answers[count] = _run(runner, prompts[:count], steps)
    alone = [_run(runner, [prompt], steps)[1][0] for prompt in prompts]
    rate = {count: count / times[count] for count in times}
    return LaneFigures(
        context_tokens,
        {count: round(1000 * seconds, 2) for count, seconds in times.items()},
        {count: round(each, 1) for count, each in rate.items()},
        {count: round(each / rate[1], 2) for count, each in rate.items()},
        round(_agreement(answers[max(counts)], alone), 4),
        runner.engine.describe(),
    )


def _run(runner: Runner, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[list[int]]]:
    """The median time of a step in which all of these decode, and their tokens.

    The prompts are in the tree by then: a prompt still has one token to evaluate, one of them in each turn.
    """
    size = ChunkSize(largest=runner.engine.max_chunk_tokens)
    scheduler = Scheduler(runner.engine, runner.prefix_cache, size, time.monotonic)
    for max_tokens in (0, steps + len(prompts)):
        ears = [_Ear() for _ in prompts]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        for ids, ear in zip(prompts, ears, strict=True):
            scheduler.add(Job(runner.prepare(Encoded(ids), params), ear))
        times = list(_time_turns(scheduler, runner, len(prompts)))
    return statistics.median(times), [ear.tokens[:steps] for ear in ears]


def _time_turns(scheduler: Scheduler, runner: Runner, count: int) -> Iterator[float]:
    """Turn until all is done; the seconds of each turn in which so many requests decode and nothing else happens."""
    while scheduler.has_work:
        is_full = len(scheduler.running) == count and all(job.is_decoding for job in scheduler.running)
        runner.engine.synchronize()
        started_s = time.perf_counter()
        scheduler.turn()
        runner.engine.synchronize()
        if is_full:
            yield time.perf_counter() - started_s


def _agreement(together: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> float:
    pairs = [pair for ours, theirs in zip(together, alone, strict=False) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
