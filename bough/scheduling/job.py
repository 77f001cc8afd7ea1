"""Jobs in the queue of the engine's thread, the news of them, and the protocol of a scheduler that runs them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from bough.cache.prefix_cache import ReuseVersion
from bough.engines.contract import Engine
from bough.errors import BoughError, EngineError
from bough.generate.constraints import Constraint
from bough.generate.generation import NO_LIMITS, AnswerLimits, Generation
from bough.generate.request import Request
from bough.generate.text import Vocabulary
from bough.types import Chunk, Completion, Usage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestBegan:
    """A request has a lane. `usage` says how much of its prompt is cached, or planned to be read from disk."""

    usage: Usage
    waited_s: float


@dataclass(frozen=True)
class PromptLoaded:
    """A request that had to read from disk does so no longer. `usage` says how much of its prompt is cached."""

    usage: Usage


@dataclass(frozen=True)
class PromptAdvanced:
    """How many tokens of the prompt are evaluated or reused."""

    done_tokens: int
    total_tokens: int


RequestNews = RequestBegan | PromptLoaded | PromptAdvanced | Chunk | Completion | BoughError
Listener = Callable[[RequestNews], object]
"""Is called with all news of a request; the last is a completion or an error. The engine's thread calls it, so it must not
block. One that raises ends its own request, and is called with that error."""

News = TypeVar("News")


class QueuedJob(Generic[News]):
    """A job for the engine's thread. `tenant` names the client, where its identity is proved."""

    kind = "request"  # for messages
    has_started = False
    is_over = False  # the listener has had its last news

    def __init__(self, listener: Callable[[News | BoughError], object], tenant: str = "") -> None:
        self.listener = listener
        self.tenant = tenant
        self.submitted_s = 0.0
        self._ending = threading.Lock()

    def end(self, news: News) -> None:
        """Give the listener its last news, unless the job is over."""
        self._end_once(news)

    def fail(self, error: BoughError) -> None:
        """As `end`. The watchdog calls this from its own thread while the engine is stuck."""
        self._end_once(error)

    def refuse(self, error: BoughError) -> bool:
        """Refuse a job that waits, from any thread; returns False if it has started or ended."""
        with self._ending:
            if self.has_started or self.is_over:
                return False
            self.is_over = True
        self._tell(error)
        return True

    def _end_once(self, news: News | BoughError) -> None:
        with self._ending:
            was_over, self.is_over = self.is_over, True
        if not was_over:
            self._tell(news)

    def _tell(self, news: News | BoughError) -> None:
        """Call the listener. If it raises, the error is logged and this job ends; the others go on."""
        try:
            self.listener(news)
        except Exception as error:
            log.exception("the listener of a %s failed by a mistake of ours", self.kind)
            if not self.is_over:
                self.is_over = True
                self._tell(EngineError(f"{type(error).__name__}: {error}"))


class TurnScheduler(Protocol):
    """Runs jobs in turns. Only one thread calls it; others may read `waiting` and `running`."""

    @property
    def waiting(self) -> Sequence[QueuedJob[Any]]: ...

    @property
    def running(self) -> Sequence[QueuedJob[Any]]: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def num_free_lanes(self) -> int:
        """How many of the waiting jobs do not count as such, because they will run in the next turn."""

    @property
    def is_only_loading(self) -> bool:
        """Whether there is nothing to compute until something has been read from disk."""

    def add(self, job: Any) -> None: ...

    def turn(self) -> None: ...

    def fail_all(self, error: BoughError) -> None: ...

    def postpone_check(self) -> None:
        """Cancel work that requests go before."""

    def sweep(self) -> None:
        """End jobs that were cancelled or are over."""


@dataclass(frozen=True)
class ReusableTokens:
    """The tokens of a prompt that could be reused in one state of the cache."""

    version: ReuseVersion
    num_tokens: int


@dataclass(frozen=True)
class MemoryState:
    """The facts that decide whether a request has room: requests that ended, lanes, loads, the cache."""

    num_ended: int
    num_busy: int
    reserved_bytes: int
    version: ReuseVersion


class Job(Generation, QueuedJob[RequestNews]):
    """One request that runs: an answer that is generated, in the queue of the scheduler or on a lane.

    `passed` counts how often others were preferred, for a lane, then for a chunk. As a request of the service it belongs to
    no replica.
    """

    replica = request_id = ""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        vocabulary: Vocabulary,
        constraint: Constraint | None,
        clock: Callable[[], float],
        listener: Listener = lambda news: None,
        *,
        limits: AnswerLimits = NO_LIMITS,
        asks_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        QueuedJob.__init__(self, listener, request.tenant)
        Generation.__init__(self, engine, request, vocabulary, constraint, clock, limits=limits, asks_to_end=asks_to_end)
        self.passed = 0
        self.leader: Job | None = None  # the request that computes the prefix it waits for
        self.reusable: ReusableTokens | None = None  # the last count, while it waits
        self.refused_at: MemoryState | None = None  # the state of lanes and tree in which there was no memory for it
        self.is_waiting_to_load = False  # because half of the lanes load already
        self.shared: WeakKeyDictionary[Job, int] = WeakKeyDictionary()  # leading tokens in common, by other request

    @property
    def num_tokens(self) -> int:
        return len(self.known)

    @property
    def reuses(self) -> bool:
        """Whether the request may reuse state: one that scores its prompt computes all of it."""
        return not self.request.scores_prompt

    @property
    def remaining(self) -> int:
        """Tokens that are still to be evaluated before the first one is chosen. The request must have a lane."""
        return self.num_tokens - self.done_tokens

    @property
    def is_prefilling(self) -> bool:
        return not (self.is_prefilled or self.is_loading or self.is_done)

    @property
    def is_decoding(self) -> bool:
        return self.is_prefilled and not self.is_done

    def start(self, waited_s: float) -> None:
        with self._ending:  # a watchdog may fail the request at the same time, and nothing may follow that
            self.has_started = True
            if not self.is_over:
                self._tell(RequestBegan(self.usage, waited_s))

    def note_progress(self, done_tokens: int, total_tokens: int) -> None:
        self.deliver(PromptAdvanced(done_tokens, total_tokens))

    def deliver(self, news: Chunk | PromptLoaded | PromptAdvanced) -> None:
        """Call the listener, unless the request is over."""
        with self._ending:
            if not self.is_over:
                self._tell(news)
