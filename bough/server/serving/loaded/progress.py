"""Requests that run, records of those that have ended for the log and the metrics, and totals.

Each answer updates its own progress, on the event loop: a few assignments. A request that has ended is kept only for the
followers of its model, until they take it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from bough.models.prompts import NOTHING_LEFT_OUT, LeftOut
from bough.server.serving.model.contract import PreparedRequest, root_at
from bough.tokens import NO_TOKENS, Tokens
from bough.types import Usage

End = Literal["done", "cancelled", "failed"]

MOST_ENDED = 256  # requests that have ended and wait for one follower; the first to end are forgotten
MOST_SALTS = 1024  # whose totals are remembered; the least recently used are forgotten


@dataclass(frozen=True)
class RequestRecord:
    """A finished request, without its prompt and answer. `usage` is None if it never began; unused times are 0.

    `decode_s` is the time from the first token to the last, `first_token_s` that from the beginning to the first, both
    without the queue. Tokens are the sum over all choices. `recomputed_tokens` were known, but loading them would have
    taken longer than computing them, or failed. `num_texts` is above 0 for embeddings and scores: each of these texts
    waited for its own place, so the request has neither a queue nor a first token.
    """

    model: str
    usage: Usage | None = None
    completion_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    host_bytes: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    recomputed_tokens: int = 0
    num_texts: int = 0
    left_out: LeftOut = NOTHING_LEFT_OUT
    error: str | None = None


@dataclass
class RecordSlot:
    """The record of one HTTP request, for its line in the log, and the id of its answer."""

    record: RequestRecord | None = None
    request_id: str = ""


current_slot: ContextVar[RecordSlot | None] = ContextVar("bough_record", default=None)
"""The slot of the HTTP request that the running task serves; None outside of one."""


def current_request_id() -> str:
    """The id of the HTTP request that the running task serves; "" outside of one."""
    slot = current_slot.get()
    return slot.request_id if slot is not None else ""


def note_record(record: RequestRecord) -> None:
    """Store the record for the HTTP request that the running task serves, if there is one."""
    slot = current_slot.get()
    if slot is not None:
        slot.record = record


@dataclass(eq=False)
class RequestProgress:
    """A request that runs. Times are seconds: of waiting for a lane, and until the first token of the answer.

    No two running requests of a salt have the same `request_id`. `done_tokens` are those of the prompt that are evaluated
    or reused; `num_generated` counts all choices. `answer_ids` are those of the first choice, when it has ended.
    """

    request_id: str
    model: str
    salt: str
    opened_s: float
    request: PreparedRequest | None = None  # of the first choice
    prompt: Tokens = NO_TOKENS
    answer_ids: Sequence[int] = ()
    usage: Usage = field(default_factory=Usage)
    has_lane: bool = False
    waited_s: float = 0.0
    first_s: float = 0.0
    done_tokens: int = 0
    num_generated: int = 0
    record: RequestRecord | None = None  # when it has ended
    end: End | None = None
    last_replica: str = ""  # when it ended

    @property
    def replica(self) -> str:
        return self.last_replica if self.request is None else self.request.replica

    @property
    def root(self) -> str:
        """The name of the tree in which its tokens are."""
        return root_at(self.replica, self.salt)


@dataclass
class Totals:
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


class FollowedRequests:
    """A follower of the requests of one model, or of all. Those that have ended wait here until they are taken."""

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
    """The requests that run, their followers, and totals by model and salt."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RequestProgress] = {}  # by salt and id, in the order in which they came
        self._totals: OrderedDict[tuple[str, str | None], Totals] = OrderedDict()
        self._followers: dict[FollowedRequests, None] = {}

    def running(self, model: str) -> list[RequestProgress]:
        """The requests of a model that have not ended, the oldest first."""
        return [each for each in self._running.values() if each.model == model]

    def begin(self, request_id: str, model: str, salt: str, now: float) -> RequestProgress:
        progress = RequestProgress(self._own_id(request_id, salt), model, salt, now)
        self._running[salt, progress.request_id] = progress
        for each in self._following(model):
            each.wakes.set()
        return progress

    def _own_id(self, request_id: str, salt: str) -> str:
        """The id, with a number if a running request has it: clients choose ids, and may ask for many answers at once."""
        own_id, numbers = request_id, count(2)
        while (salt, own_id) in self._running:
            own_id = f"{request_id}#{next(numbers)}"  # which no client can choose
        return own_id

    def end(self, progress: RequestProgress, record: RequestRecord, *, is_complete: bool) -> None:
        """Remove a request that has ended, in whatever way."""
        del self._running[progress.salt, progress.request_id]
        progress.last_replica, progress.request = progress.replica, None  # it holds a lane's session, and so the model
        progress.record = record
        progress.end = "failed" if record.error else "done" if is_complete else "cancelled"
        for salt in (None, progress.salt):
            self._add(progress.model, salt, record)
        for each in self._following(progress.model):
            each.note_end(progress)

    def totals(self, model: str, salt: str | None) -> Totals:
        return self._totals.get((model, salt), Totals())

    @contextmanager
    def follow(self, followed: FollowedRequests) -> Iterator[None]:
        """Notify the follower of all requests that begin or end."""
        self._followers[followed] = None
        try:
            yield
        finally:
            del self._followers[followed]

    def _following(self, model: str) -> list[FollowedRequests]:
        return [each for each in self._followers if each.model in (None, model)]

    def _add(self, model: str, salt: str | None, record: RequestRecord) -> None:
        key = (model, salt)
        self._totals.setdefault(key, Totals()).add(record)
        self._totals.move_to_end(key)
        while len(self._totals) > MOST_SALTS:
            self._totals.popitem(last=False)
