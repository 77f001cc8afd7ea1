"""The real scheduler, driven turn by turn in this process, with listeners that note when each token was delivered.

The scheduler sees the engine through `TimedEngine`, which adds up the seconds inside the engine: what is left of a turn is
the host's own work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

from bough.engines.contract import Engine
from bough.errors import BoughError, EngineError
from bough.generate.generation import ChunkSize
from bough.generate.request import Request
from bough.models.prompts import EncodedPrompt
from bough.runtime import Runtime
from bough.scheduling.job import RequestNews
from bough.scheduling.scheduler import Scheduler
from bough.tokens import Tokens
from bough.types import Chunk, Completion, SamplingParams

ANSWER_TOKENS = 4
"""The length of an answer of which only the first token is measured."""


class TimedEngine:
    """Passes everything on to an engine, and counts the seconds that its methods take, by name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found):
            return found
        timed = self._time(name, found)
        setattr(self, name, timed)  # found directly from now on
        return timed

    def _time(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - started_s

        return run


class Delivery:
    """Listens to one request: when each of its tokens came. It can cancel the request."""

    def __init__(self) -> None:
        self.submitted_s = time.perf_counter()
        self.token_s: list[float] = []
        self.token_ids: list[int] = []
        self.completion: Completion | None = None
        self.error: BoughError | None = None
        self.is_cancelled = False

    @property
    def is_over(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def first_token_s(self) -> float:
        """Seconds from submitting to the first token."""
        return self.token_s[0] - self.submitted_s

    def __call__(self, news: RequestNews) -> None:
        """The listener of the request."""
        if isinstance(news, Chunk):
            self.token_s += [time.perf_counter()] * len(news.token_ids)
            self.token_ids += news.token_ids
        elif isinstance(news, Completion):
            self.completion = news
        elif isinstance(news, BoughError):
            self.error = news


def require_running(deliveries: Sequence[Delivery]) -> None:
    """Raise EngineError if one of these requests is over."""
    ended = next((each for each in deliveries if each.is_over), None)
    if ended is not None:
        counts = sorted(len(each.token_ids) for each in deliveries)
        reason = ended.error or f"{ended.completion and ended.completion.finish_reason}, {len(ended.token_ids)} tokens"
        raise EngineError(f"a request ended too soon: {reason}; the requests have {counts[0]} to {counts[-1]} tokens")


class Driver:
    """A scheduler over a runtime's engine and cache. One of them is kept for a whole run: it learns the size of a chunk."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.engine = TimedEngine(runtime.engine)
        size = ChunkSize(runtime.settings.chunk, largest=runtime.engine.max_chunk_tokens)
        self._scheduler = Scheduler(cast(Engine, self.engine), runtime.prefix_cache, size, time.monotonic)

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Delivery:
        """Queue a request."""
        delivery = Delivery()
        request = Request.of(EncodedPrompt(Tokens.of(ids)), params)
        job = self.runtime.prepare(request, delivery, lambda: delivery.is_cancelled)
        delivery.submitted_s = time.perf_counter()
        self._scheduler.add(job)
        return delivery

    def turn(self) -> None:
        self._scheduler.turn()

    def is_decoding(self, count: int) -> bool:
        """Whether so many requests run, and all of them decode."""
        running = self._scheduler.running
        return len(running) == count and all(job.is_decoding for job in running)

    def turn_until(self, is_done: Callable[[], bool], deliveries: Sequence[Delivery]) -> None:
        """Run turns until something holds. Raises EngineError if a request ends before."""
        while not is_done():
            require_running(deliveries)
            self.turn()

    def finish(self) -> None:
        """Run turns until no request is left."""
        while self._scheduler.has_work:
            self.turn()

    def answer(self, ids: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Delivery:
        """Run one request alone. Raises what ended it."""
        delivery = self.submit(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        self.finish()
        if delivery.error is not None:
            raise delivery.error
        return delivery
