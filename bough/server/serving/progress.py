"""Requests under way and those that have just ended, for whoever watches the server.

Each answer notes its own progress here, on the event loop. That costs a few assignments, whether or not somebody watches.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from bough.scheduling.job import Job
from bough.server.serving.record import RequestRecord
from bough.types import Usage

End = Literal["done", "cancelled", "failed"]

MOST_ENDED = 256
"""So many requests that have ended are remembered, for those who watch."""

MOST_SALTS = 1024
"""The totals of so many salts are remembered; those that were used longest ago are forgotten first."""


@dataclass(eq=False)
class RequestProgress:
    """One request on its way. Times are seconds: of waiting for a lane, and until the first token of the answer.

    `done_tokens` are those of the prompt that are evaluated or reused; `num_generated` counts all choices. `answer_ids` are
    those of the first choice, when it has ended.
    """

    request_id: str
    model: str
    salt: str
    opened_s: float
    job: Job | None = None  # of the first choice
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()
    usage: Usage = field(default_factory=Usage)
    has_lane: bool = False
    waited_s: float = 0.0
    first_s: float = 0.0
    done_tokens: int = 0
    num_generated: int = 0
    record: RequestRecord | None = None  # when it has ended
    end: End | None = None


@dataclass
class Totals:
    """What requests have come to since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        usage = record.usage or Usage()
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.computed_tokens += usage.computed_tokens
        self.completion_tokens += record.completion_tokens


class LiveRequests:
    """The requests under way, the last ones that have ended, and totals by model and salt."""

    def __init__(self) -> None:
        self.running: dict[RequestProgress, None] = {}  # in the order in which they came
        self.num_ended = 0
        self._ended: deque[RequestProgress] = deque(maxlen=MOST_ENDED)
        self._totals: OrderedDict[tuple[str, str | None], Totals] = OrderedDict()
        self._waiters: set[asyncio.Event] = set()

    def begin(self, request_id: str, model: str, salt: str, now: float) -> RequestProgress:
        """A request has come for a model that is loaded."""
        progress = RequestProgress(request_id, model, salt, now)
        self.running[progress] = None
        self._wake()
        return progress

    def end(self, progress: RequestProgress, record: RequestRecord, *, is_complete: bool) -> None:
        """A request has ended, however."""
        self.running.pop(progress, None)
        progress.record = record
        progress.end = "failed" if record.error else "done" if is_complete else "cancelled"
        self.num_ended += 1
        self._ended.append(progress)
        for salt in (None, progress.salt):
            self._add(progress.model, salt, record)
        self._wake()

    def ended_since(self, num_ended: int) -> list[RequestProgress]:
        """Those that have ended since there were so many, as far as they are remembered."""
        return list(self._ended)[max(0, len(self._ended) - (self.num_ended - num_ended)) :]

    def totals(self, model: str, salt: str | None) -> Totals:
        """The totals of a model, or of one salt of it."""
        return self._totals.get((model, salt), Totals())

    @contextmanager
    def waking(self, event: asyncio.Event) -> Iterator[None]:
        """Set this event whenever a request begins or ends."""
        self._waiters.add(event)
        try:
            yield
        finally:
            self._waiters.discard(event)

    def _wake(self) -> None:
        for event in self._waiters:
            event.set()

    def _add(self, model: str, salt: str | None, record: RequestRecord) -> None:
        key = (model, salt)
        self._totals.setdefault(key, Totals()).add(record)
        self._totals.move_to_end(key)
        while len(self._totals) > MOST_SALTS:
            self._totals.popitem(last=False)
