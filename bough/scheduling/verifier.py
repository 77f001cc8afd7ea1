"""Checks of the cache in production: a share of the prompts that hit the cache is computed again and compared.

A check runs only when there are no requests. It has a lane and a salt of its own, so that it reuses nothing and leaves
nothing behind. When a request arrives, the check is cancelled and postponed. It compares the log-probabilities of the most
likely next tokens after the prompt. A difference beyond rounding is counted and logged as an error. A check that fails does
not affect any request.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.engines.contract import Engine, Logits
from bough.errors import BoughError
from bough.generate.generation import Generation
from bough.generate.request import Request
from bough.scheduling.job import Job
from bough.types import Alternative, Chunk, Completion, Draw, SamplingParams, Usage

log = logging.getLogger(__name__)

MAX_PENDING = 8
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
LOOSE_TOLERANCE = 0.5
"""For half precision, where log-probabilities are rounded differently in every layer."""

_NUM_COMPARED = 20
_TOP_LOGPROBS = SamplingParams(logprobs=_NUM_COMPARED)


@dataclass(frozen=True)
class CacheHit:
    """A prompt that was partly reused, and the most likely tokens after it."""

    ids: Sequence[int]
    cached_tokens: int
    top: tuple[Alternative, ...]


class Verifier:
    """Records a share of all cache hits and checks them. At most `MAX_PENDING` wait; then the oldest is dropped."""

    def __init__(
        self,
        engine: Engine,
        share: float,
        random: Callable[[], float],
        prepare: Callable[[Request], Generation],
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
        """How many hits were checked, and how many of them differ from the computation without the cache."""
        return {"verified": self.num_checked, "different": self.num_different}

    def note(self, generation: Generation) -> None:
        """Record a prompt that was just evaluated for a later check, if it hit the cache and falls in the random share."""
        usage = generation.usage
        if not usage.cached_tokens or self._random() >= self._share:
            return
        try:
            top = self._most_likely(generation.logits)
        except (BoughError, MemoryError) as error:
            log.info("a cache hit could not be recorded for a check: %s", error)
        else:
            self._pending.append(CacheHit(generation.request.known_ids, usage.cached_tokens, top))

    def next_check(self) -> Job | None:
        """The oldest recorded hit, as a request that computes its prompt from the first token."""
        if not self._pending:
            return None
        seen = self._pending.popleft()
        salt = f"\0verify {self.num_checked}"
        generation = self._prepare(Request(seen.ids, SamplingParams(max_tokens=0), salt=salt, store=False))
        check = Job(generation, _Check(self, generation, seen))
        self._running = check, seen
        return check

    def postpone(self) -> Job | None:
        """Queue the check that runs, if any, to run again later. The caller cancels the returned job."""
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
                len(seen.ids),
                seen.cached_tokens,
                difference,
                self._tolerance,
            )

    def _most_likely(self, logits: Logits) -> tuple[Alternative, ...]:
        (sampled,) = self._engine.sample([logits], [Draw(_TOP_LOGPROBS)])
        return sampled.top


class _Check:
    """The listener of a check: when the prompt is evaluated, it compares the two results."""

    def __init__(self, verifier: Verifier, generation: Generation, seen: CacheHit) -> None:
        self._verifier = verifier
        self._generation = generation
        self._seen = seen

    def on_start(self, usage: Usage, waited_s: float) -> None:
        assert usage.cached_tokens == 0, "a check computes everything"

    def on_loaded(self, usage: Usage) -> None:
        raise AssertionError("a check loads nothing")

    def on_chunk(self, chunk: Chunk) -> None:
        raise AssertionError("a check generates nothing")

    def on_end(self, completion: Completion) -> None:
        if completion.finish_reason == "cancelled":  # it was postponed
            return
        try:
            self._verifier.compare(self._seen, self._generation.logits)
        except (BoughError, MemoryError) as error:
            log.info("a check of the cache failed: %s", error)

    def on_error(self, error: BoughError) -> None:
        log.info("a check of the cache failed: %s", error)
