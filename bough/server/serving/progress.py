"""Requests under way, for whoever follows them, and totals of those that have ended.

Each answer notes its own progress here, on the event loop. That costs a few assignments, whether or not somebody follows.
A request that has ended is kept only for those who follow its model, until they take it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from bough.server.serving.model.contract import PreparedRequest, root_at
from bough.server.serving.record import RequestRecord
from bough.types import Usage

End = Literal["done", "cancelled", "failed"]

MOST_ENDED = 256
"""So many requests that have ended wait for who follows them; those that ended first are forgotten."""

MOST_SALTS = 1024
"""The totals of so many salts are remembered; those that were used longest ago are forgotten first."""


@dataclass(eq=False)
class RequestProgress:
    """One request on its way. Times are seconds: of waiting for a lane, and until the first token of the answer.

    No two running requests of a salt have the same `request_id`: the second one with an id gets a number behind it.
    `done_tokens` are those of the prompt that are evaluated or reused; `num_generated` counts all choices. `answer_ids` are
    those of the first choice, when it has ended.
    """

    request_id: str
    model: str
    salt: str
    opened_s: float
    request: PreparedRequest | None = None  # of the first choice
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
    last_replica: str = ""  # that had it when it ended

    @property
    def replica(self) -> str:
        """The replica that has it; "" without replicas, and before one has taken it."""
        return self.last_replica if self.request is None else self.request.replica

    @property
    def root(self) -> str:
        """The name of the tree in which its tokens are."""
        return root_at(self.replica, self.salt)


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


class Followed:
    """The requests of one model, or of all, for who follows them: those that have ended wait here until they are taken."""

    def __init__(self, model: str | None) -> None:
        self.model = model
        self.wakes = asyncio.Event()  # set when one begins or ends
        self._ended: deque[RequestProgress] = deque(maxlen=MOST_ENDED)

    def note_end(self, progress: RequestProgress) -> None:
        self._ended.append(progress)
        self.wakes.set()

    def take_ended(self) -> list[RequestProgress]:
        """Those that have ended since the last call, as far as they are remembered."""
        ended = list(self._ended)
        self._ended.clear()
        return ended


class LiveRequests:
    """The requests under way, who follows them, and totals by model and salt."""

    def __init__(self) -> None:
        self._running: dict[RequestProgress, None] = {}  # in the order in which they came
        self._ids: set[tuple[str, str]] = set()  # salts and ids of those that run
        self._totals: OrderedDict[tuple[str, str | None], Totals] = OrderedDict()
        self._followers: dict[Followed, None] = {}

    def running(self, model: str) -> list[RequestProgress]:
        """The requests of a model that have not ended, the oldest first."""
        return [each for each in self._running if each.model == model]

    def begin(self, request_id: str, model: str, salt: str, now: float) -> RequestProgress:
        """A request has come for a model that is loaded."""
        progress = RequestProgress(self._own_id(request_id, salt), model, salt, now)
        self._ids.add((salt, progress.request_id))
        self._running[progress] = None
        for each in self._following(model):
            each.wakes.set()
        return progress

    def _own_id(self, request_id: str, salt: str) -> str:
        """The id, with a number if a running request has it: clients choose ids, and may ask for many answers at once."""
        own_id, numbers = request_id, count(2)
        while (salt, own_id) in self._ids:
            own_id = f"{request_id}#{next(numbers)}"  # which no client can choose
        return own_id

    def end(self, progress: RequestProgress, record: RequestRecord, *, is_complete: bool) -> None:
        """A request has ended, however."""
        self._running.pop(progress, None)
        self._ids.discard((progress.salt, progress.request_id))
        progress.last_replica, progress.request = progress.replica, None  # it holds a lane's session, and so the model
        progress.record = record
        progress.end = "failed" if record.error else "done" if is_complete else "cancelled"
        for salt in (None, progress.salt):
            self._add(progress.model, salt, record)
        for each in self._following(progress.model):
            each.note_end(progress)

    def totals(self, model: str, salt: str | None) -> Totals:
        """The totals of a model, or of one salt of it."""
        return self._totals.get((model, salt), Totals())

    @contextmanager
    def follow(self, followed: Followed) -> Iterator[None]:
        """Tell of all requests that begin or end."""
        self._followers[followed] = None
        try:
            yield
        finally:
            del self._followers[followed]

    def _following(self, model: str) -> list[Followed]:
        return [each for each in self._followers if each.model in (None, model)]

    def _add(self, model: str, salt: str | None, record: RequestRecord) -> None:
        key = (model, salt)
        self._totals.setdefault(key, Totals()).add(record)
        self._totals.move_to_end(key)
        while len(self._totals) > MOST_SALTS:
            self._totals.popitem(last=False)
