"""Checks of the cache in production: a share of the prompts that hit the cache is computed again and compared.

A check runs only when there are no requests; when one arrives, it is cancelled and postponed. It has a lane and a salt of
its own, so that it reuses nothing and leaves nothing behind. It compares the log-probabilities of the most likely next
tokens after the prompt. A difference beyond rounding is counted and logged as an error; requests are not affected.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bough.engines.contract import Engine, Logits
from bough.errors import BoughError
from bough.generate.generation import Generation
from bough.generate.request import Request
from bough.scheduling.job import Job, Listener, RequestNews
from bough.tokens import Tokens
from bough.types import Alternative, Completion, Draw, SamplingParams

log = logging.getLogger(__name__)

MAX_PENDING = 8
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
LOOSE_TOLERANCE = 0.5  # for half precision, where log-probabilities are rounded differently in every layer

_NUM_COMPARED = 20
_TOP_LOGPROBS = SamplingParams(logprobs=_NUM_COMPARED)


@dataclass(frozen=True)
class CacheHit:
    """A prompt that was partly reused, and the most likely tokens after it."""

    tokens: Tokens
    cached_tokens: int
    top: tuple[Alternative, ...]


class Verifier:
    """Records a share of all cache hits and checks them. At most `MAX_PENDING` wait; then the oldest is dropped."""

    def __init__(
        self, engine: Engine, share: float, random: Callable[[], float], prepare: Callable[[Request, Listener], Job]
    ) -> None:
        self._engine = engine
        self._share = share
        self._random = random
        self._prepare = prepare
        self._pending: deque[CacheHit] = deque(maxlen=MAX_PENDING)
        self._tolerance = TOLERANCE.get(engine.info.weights, LOOSE_TOLERANCE)
        self._running: tuple[Job, CacheHit] | None = None
        self.num_checked = 0
        self.num_different = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    def stats(self) -> dict[str, int]:
        return {"verified": self.num_checked, "different": self.num_different}

    def note(self, generation: Generation) -> None:
        """Record an evaluated prompt for a later check, if it hit the cache and falls in the random share."""
        usage = generation.usage
        if not usage.cached_tokens or self._random() >= self._share:
            return
        try:
            top = self._most_likely(generation.logits)
        except (BoughError, MemoryError) as error:
            log.info("a cache hit could not be recorded for a check: %s", error)
        else:
            self._pending.append(CacheHit(generation.known, usage.cached_tokens, top))

    def next_check(self) -> Job | None:
        """The oldest recorded hit, as a request that computes its prompt from the first token."""
        if not self._pending:
            return None
        seen = self._pending.popleft()
        salt = f"\0verify {self.num_checked}"
        request = Request(seen.tokens, SamplingParams(max_tokens=0), salt=salt, keep_state=False)
        check = self._prepare(request, self._hear)
        self._running = check, seen
        return check

    def postpone(self) -> Job | None:
        """Queue the running check, if any, to run again later. The caller cancels the returned job."""
        running, self._running = self._running, None
        if running is None or running[0].is_over:
            return None
        check, seen = running
        if len(self._pending) < MAX_PENDING:
            self._pending.appendleft(seen)
        return check

    def compare(self, seen: CacheHit, logits: Logits) -> None:
        """Count a check, and log an error if the tokens after the prompt differ from those with the cache."""
        again = {each.token_id: each.logprob for each in self._most_likely(logits)}
        self.num_checked += 1
        common = [(each.logprob, again[each.token_id]) for each in seen.top if each.token_id in again]
        difference = max((abs(one - other) for one, other in common), default=float("inf"))
        if difference > self._tolerance:
            self.num_different += 1
            log.error(
                "ALARM: a prompt of %d tokens, %d of them cached, is followed by other log-probabilities than without "
                "the cache: they differ by %.2g, and may by %.2g",
                len(seen.tokens),
                seen.cached_tokens,
                difference,
                self._tolerance,
            )

    def _most_likely(self, logits: Logits) -> tuple[Alternative, ...]:
        (sampled,) = self._engine.sample([logits], [Draw(_TOP_LOGPROBS)])
        return sampled.top

    def _hear(self, news: RequestNews) -> None:
        """The listener of the running check. One that was postponed is not compared."""
        if self._running is None:
            return
        check, seen = self._running
        if isinstance(news, BoughError):
            log.info("a check of the cache failed: %s", news)
        elif isinstance(news, Completion) and news.finish_reason != "cancelled":
            try:
                self.compare(seen, check.logits)
            except (BoughError, MemoryError) as error:
                log.info("a check of the cache failed: %s", error)
