"""Texts of many clients, encoded in batches.

One thread calls `turn` in a loop. Each turn encodes one batch: the text that has waited longest, and others of similar
length, so that there is little padding. So every text has its turn, and one turn takes a bounded time. If a batch fails,
its texts are encoded alone, one in each turn, and only a text that fails by itself fails.

Always true between turns: a text waits, or it is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.engines.contract import EncoderEngine, EncoderInput
from bough.errors import BoughError, EngineError, RequestCancelled

log = logging.getLogger(__name__)

_SIMILAR_TOKENS = 16  # texts that differ by no more than this are similar, however short they are
_MAX_BATCH_TEXTS = 256

OnEncoded = Callable[[Sequence[float] | BoughError], None]
"""Is told the numbers of one text, or why there are none, once. It must not block."""


@dataclass(eq=False)
class EncoderJob:
    """One text for the scheduler. `tenant` names the client, where its identity is proved."""

    text: EncoderInput
    on_encoded: OnEncoded
    is_cancelled: Callable[[], bool] = lambda: False
    tenant: str = ""
    submitted_s: float = 0.0
    has_started: bool = False
    runs_alone: bool = False  # since a batch with it has failed
    is_over: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.text.ids)

    def end(self, numbers: Sequence[float]) -> None:
        self._end_once(numbers)

    def fail(self, error: BoughError) -> None:
        """Tell the listener. The watchdog calls this from its own thread while the engine is stuck."""
        self._end_once(error)

    def refuse(self, error: BoughError) -> bool:
        """Refuse a text that waits, from any thread; returns False if it has started or ended."""
        return not self.has_started and self._end_once(error)

    def _end_once(self, result: Sequence[float] | BoughError) -> bool:
        with self._ending:
            was_over, self.is_over = self.is_over, True
        if was_over:
            return False
        try:
            self.on_encoded(result)
        except Exception:  # the other texts must go on
            log.exception("the listener of a text failed by a mistake of ours")
        return True


class EncoderScheduler:
    """Waiting and running texts. Only one thread calls it; others may read the two lists."""

    is_only_loading = False  # nothing is read from disk

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine
        self.waiting: list[EncoderJob] = []
        self.running: list[EncoderJob] = []
        self.num_turns = 0
        self.num_encoded = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    @property
    def num_free_lanes(self) -> int:
        return 0 if self.running else 1

    def add(self, job: EncoderJob) -> None:
        """Queue a text."""
        self.waiting.append(job)

    def turn(self) -> None:
        """Encode one batch, if a text waits."""
        self.sweep()
        batch = self._choose()
        if not batch:
            return
        self.num_turns += 1
        for job in batch:
            job.has_started = True
        self.running = batch
        self.waiting = [job for job in self.waiting if not job.has_started]
        self._encode(batch)
        self.running = []  # after an error of ours they are still here, and `fail_all` ends them

    def sweep(self) -> None:
        """End texts that were cancelled, and drop those that are over."""
        for job in self.waiting:
            if not job.is_over and job.is_cancelled():
                job.fail(RequestCancelled("the request was cancelled"))
        self.waiting = [job for job in self.waiting if not job.is_over]

    def postpone_check(self) -> None:
        """There are no checks."""

    def fail_all(self, error: BoughError) -> None:
        """End every text with this error."""
        for job in [*self.waiting, *self.running]:
            job.fail(error)
        self.waiting, self.running = [], []

    def _choose(self) -> list[EncoderJob]:
        """The oldest text, and those nearest to it in length that fit into one batch."""
        if not self.waiting:
            return []
        oldest, *others = self.waiting
        most = self._engine.max_batch_tokens
        if oldest.runs_alone or not most:
            return [oldest]
        similar = [job for job in others if not job.runs_alone and _are_similar(job.num_tokens, oldest.num_tokens)]
        batch, longest = [oldest], oldest.num_tokens
        for job in sorted(similar, key=lambda job: abs(job.num_tokens - oldest.num_tokens)):
            longest = max(longest, job.num_tokens)
            if longest * (len(batch) + 1) > most or len(batch) == _MAX_BATCH_TEXTS:
                break
            batch.append(job)
        return batch

    def _encode(self, batch: Sequence[EncoderJob]) -> None:
        try:
            numbers = self._engine.encode([job.text for job in batch])
        except (BoughError, MemoryError) as error:
            self._retry_alone(batch, error if isinstance(error, BoughError) else EngineError(f"no memory: {error}"))
            return
        self.num_encoded += len(batch)
        for job, each in zip(batch, numbers, strict=True):
            job.end(each)

    def _retry_alone(self, batch: Sequence[EncoderJob], error: BoughError) -> None:
        """After a batch has failed: its texts wait again, before all others, and each runs alone."""
        if len(batch) == 1:
            batch[0].fail(error)
            return
        for job in batch:
            job.has_started, job.runs_alone = False, True
        self.waiting = [*batch, *self.waiting]


def _are_similar(num_tokens: int, other: int) -> bool:
    """Whether two texts are encoded together: the longer one has at most about twice the tokens of the other."""
    short, long = sorted((num_tokens, other))
    return long <= max(2 * short, short + _SIMILAR_TOKENS)
