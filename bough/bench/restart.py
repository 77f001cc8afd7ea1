"""`bough bench restart`: the first token after a restart, with state read from disk, against computing it again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bough.bench.timing import answer, first_token_ms, median_ms, warm_up
from bough.bench.workload import random_prompts
from bough.cache.disk import page_files
from bough.runner import load
from bough.runtime import Runtime

ANSWER_TOKENS = 4
SLOW_BYTES_S = 4e6


@dataclass(frozen=True)
class RestartFigures:
    """Medians in milliseconds of the first token of a prompt that was computed before the restart."""

    tokens: int
    computed_ms: float  # without a disk
    computed_while_writing_ms: float
    restarted_ms: float
    reading_ms: float  # part of restarted_ms
    read_bytes: int
    start_ms: float  # loading the model and the tree
    slow_disk_ms: float  # the slowest request with a disk that reads SLOW_BYTES_S
    slow_disk_computed_ms: float  # computing as many tokens in the same run
    answers_equal: bool
    setup: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.computed_ms / self.restarted_ms


def measure_restart(model: str | None, num_tokens: int, rounds: int = 3, **settings: Any) -> RestartFigures:
    """Compute prompts, close the model, load it again, and answer the same prompts."""
    with tempfile.TemporaryDirectory(prefix="bough-restart-") as folder:
        with load(model, cache_folder=folder, disk=0, **settings) as runner:
            runtime = runner.runtime
            warm_up(runtime)
            prompts = _make_prompts(runtime, num_tokens, rounds)
            computed = [answer(runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
        with load(model, cache_folder=folder, disk="64G", **settings) as runner:
            runtime = runner.runtime
            warm_up(runtime)
            writing = [answer(runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
        started = time.perf_counter()
        with load(model, cache_folder=folder, disk="64G", **settings) as runner:
            start_s, runtime = time.perf_counter() - started, runner.runtime
            warm_up(runtime)
            restarted = [answer(runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
            setup = runtime.engine.describe()
        with load(model, cache_folder=folder, disk="64G", **settings) as runner, _slow_disk():
            runtime = runner.runtime
            warm_up(runtime)
            fresh = [
                answer(runtime, prompt, ANSWER_TOKENS) for prompt in _make_prompts(runtime, num_tokens, rounds, seed=1)
            ]
            slow = [answer(runtime, prompt, ANSWER_TOKENS) for prompt in prompts]
    return RestartFigures(
        tokens=num_tokens,
        computed_ms=first_token_ms(computed),
        computed_while_writing_ms=first_token_ms(writing),
        restarted_ms=first_token_ms(restarted),
        reading_ms=median_ms([each.timings.loading.load_s for each in restarted]),
        read_bytes=min(each.timings.loading.disk_bytes for each in restarted),
        start_ms=round(1000 * start_s, 1),
        slow_disk_ms=round(1000 * max(each.timings.first_token_s for each in slow), 3),
        slow_disk_computed_ms=first_token_ms(fresh),
        answers_equal=[a.token_ids for a in computed] == [a.token_ids for a in restarted],
        setup=setup,
    )


@contextmanager
def _slow_disk() -> Iterator[None]:
    """Slow every read down to SLOW_BYTES_S."""
    before = page_files.read_into

    def read_into(descriptor: int, view: memoryview) -> int:
        count = before(descriptor, view)
        time.sleep(count / SLOW_BYTES_S)
        return count

    page_files.read_into = read_into
    try:
        yield
    finally:
        page_files.read_into = before


def _make_prompts(runtime: Runtime, num_tokens: int, rounds: int, seed: int = 0) -> list[list[int]]:
    return random_prompts(range(3, runtime.engine.vocab_size), num_tokens, rounds, seed)
