"""Texts of many clients, encoded in batches.

One thread calls `turn` in a loop. Each turn encodes one batch: the text that has waited longest, and others of similar
length, for little padding. So every text has its turn, and a turn takes a bounded time. If a batch fails, its texts are
encoded alone, one in each turn, and only a text that fails by itself fails.

Always true between turns: a text waits, or it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bough.engines.contract import EncoderEngine
from bough.errors import BoughError, EngineError, RequestCancelled
from bough.scheduling.job import QueuedJob
from bough.types import EncoderInput

_SIMILAR_TOKENS = 16  # texts that differ by no more than this are similar, however short they are
_MAX_BATCH_TEXTS = 256


class EncoderJob(QueuedJob[Sequence[float]]):
    """One text for the scheduler. Its listener gets the numbers of the text, or why there are none, once."""

    kind = "text"

    def __init__(
        self,
        text: EncoderInput,
        listener: Callable[[Sequence[float] | BoughError], None],
        is_cancelled: Callable[[], bool] = lambda: False,
        tenant: str = "",
    ) -> None:
        super().__init__(listener, tenant)
        self.text = text
        self.is_cancelled = is_cancelled
        self.runs_alone = False  # since a batch with it has failed

    @property
    def num_tokens(self) -> int:
        return len(self.text.ids)


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
        self.waiting.append(job)

    def turn(self) -> None:
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
        """Does nothing: there are no checks."""

    def fail_all(self, error: BoughError) -> None:
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
        """Queue the texts of a failed batch before all others, each to run alone."""
        if len(batch) == 1:
            batch[0].fail(error)
            return
        for job in batch:
            job.has_started, job.runs_alone = False, True
        self.waiting = [*batch, *self.waiting]


def _are_similar(num_tokens: int, other: int) -> bool:
    """Whether the longer of two texts has at most about twice the tokens of the other."""
    short, long = sorted((num_tokens, other))
    return long <= max(2 * short, short + _SIMILAR_TOKENS)
