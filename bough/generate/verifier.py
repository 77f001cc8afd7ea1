"""Checking the cache while it serves: a share of the prompts that were reused is computed again, and the two compared.

A check runs when nothing else does, on a lane of its own, under a salt that nobody has: so nothing of it is reused and
nothing of it is kept. When somebody comes meanwhile it is put off, and made anew when all is quiet again. What is compared
are the log-probabilities of the likeliest tokens that follow the prompt. A difference beyond rounding is counted, logged
and never forgotten: somebody must look. A check that fails costs nobody an answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.engines.contract import Engine, Logits
from bough.errors import BoughError
from bough.generate.generation import Generation
from bough.generate.job import Job
from bough.generate.request import Request
from bough.types import Alternative, Chunk, Completion, Draw, SamplingParams, Usage

log = logging.getLogger(__name__)

MAX_PENDING = 8
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
LOOSE_TOLERANCE = 0.5
"""Of half precision: log-probabilities of the likeliest tokens, rounded differently in every layer."""

_NUM_COMPARED = 20
_LOOK = SamplingParams(logprobs=_NUM_COMPARED)


@dataclass(frozen=True)
class Sighting:
    """What followed a prompt that was reused."""

    ids: Sequence[int]
    cached_tokens: int
    top: tuple[Alternative, ...]


class Verifier:
    """Takes note of a share of all hits and makes checks of them; at most `MAX_PENDING` wait, then the oldest goes."""

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
        self._pending: deque[Sighting] = deque(maxlen=MAX_PENDING)
        self._tolerance = TOLERANCE.get(engine.info.weights, LOOSE_TOLERANCE)
        self._running: tuple[Job, Sighting] | None = None
        self.num_checked = 0
        self.num_different = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    def stats(self) -> dict[str, int]:
        """How many hits were checked, and how many of them were followed by something else without the cache."""
        return {"verified": self.num_checked, "different": self.num_different}

    def note(self, generation: Generation) -> None:
        """Remember what follows a prompt that has just been evaluated, if it was reused and the dice say so."""
        usage = generation.usage
        if not usage.cached_tokens or self._random() >= self._share:
            return
        try:
            top = self._likeliest(generation.logits)
        except (BoughError, MemoryError) as error:
            log.info("what follows a prompt could not be noted, to check the cache: %s", error)
        else:
            self._pending.append(Sighting(generation.request.ids, usage.cached_tokens, top))

    def next_check(self) -> Job | None:
        """The oldest hit that was noted, as a request that computes its prompt from the first token."""
        if not self._pending:
            return None
        seen = self._pending.popleft()
        salt = f"\0verify {self.num_checked}"
        generation = self._prepare(Request(seen.ids, SamplingParams(max_tokens=0), salt=salt, store=False))
        check = Job(generation, _Check(self, generation, seen))
        self._running = check, seen
        return check

    def put_off(self) -> Job | None:
        """Give up the check that runs, if one does, and remember what it was of. The caller cancels it."""
        running, self._running = self._running, None
        if running is None or running[0].is_over:
            return None
        check, seen = running
        if len(self._pending) < MAX_PENDING:
            self._pending.appendleft(seen)
        return check

    def compare(self, seen: Sighting, logits: Logits) -> None:
        """Count a check; raise the alarm if what follows the prompt is not what it was with the cache."""
        again = {each.token_id: each.logprob for each in self._likeliest(logits)}
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

    def _likeliest(self, logits: Logits) -> tuple[Alternative, ...]:
        (sampled,) = self._engine.sample([logits], [Draw(_LOOK)])
        return sampled.top


class _Check:
    """Listens to a check: when its prompt is evaluated, the two are compared."""

    def __init__(self, verifier: Verifier, generation: Generation, seen: Sighting) -> None:
        self._verifier = verifier
        self._generation = generation
        self._seen = seen

    def on_start(self, usage: Usage, waited_s: float) -> None:
        assert usage.cached_tokens == 0, "a check computes everything"

    def on_chunk(self, chunk: Chunk) -> None:
        raise AssertionError("a check generates nothing")

    def on_end(self, completion: Completion) -> None:
        if completion.finish_reason == "cancelled":  # it was put off
            return
        try:
            self._verifier.compare(self._seen, self._generation.logits)
        except (BoughError, MemoryError) as error:
            log.info("a check of the cache could not be made: %s", error)

    def on_error(self, error: BoughError) -> None:
        log.info("a check of the cache could not be made: %s", error)
