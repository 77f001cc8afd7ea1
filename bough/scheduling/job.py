"""A request that runs beside others: its generation, its listener, and its deadline."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVarTuple
from weakref import WeakKeyDictionary

from bough.cache.prefix_cache import ReuseVersion
from bough.cache.tree.tokens import num_tokens, pack
from bough.errors import BoughError, EngineError
from bough.generate.generation import Generation
from bough.types import Chunk, Completion, Usage

log = logging.getLogger(__name__)
News = TypeVarTuple("News")


class Listener(Protocol):
    """Is told what happens to a request. The engine's thread calls it, so it must not block.

    The last call is `on_end` or `on_error`. A listener that raises ends its own request, and gets `on_error`.
    """

    def on_start(self, usage: Usage, waited_s: float) -> None:
        """The request has a lane; `usage` says how much of its prompt is cached, or planned to be read from disk."""
        ...

    def on_loaded(self, usage: Usage) -> None:
        """A request that had to read from disk does so no longer; `usage` says how much of its prompt is cached."""
        ...

    def on_chunk(self, chunk: Chunk) -> None: ...
    def on_end(self, completion: Completion) -> None: ...
    def on_error(self, error: BoughError) -> None: ...


@dataclass(frozen=True)
class Reusable:
    """How many tokens of a prompt could be reused, and the state of the cache for which that holds."""

    version: ReuseVersion
    num_tokens: int


@dataclass(frozen=True)
class MemoryState:
    """Everything by which a request that had no room may have room later: requests that ended, lanes, loads, the cache."""

    num_ended: int
    num_busy: int
    reserved_bytes: int
    version: ReuseVersion


@dataclass(eq=False)
class Job:
    """One request for the scheduler. `passed` counts how often others were preferred, for a lane, then for a chunk.

    `tenant` names the client, where its identity is proved. Lanes and the queue are shared fairly among tenants.
    """

    generation: Generation
    listener: Listener
    deadline_s: float = math.inf
    submitted_s: float = 0.0
    passed: int = 0
    leader: Job | None = None  # the request that computes the prefix it waits for
    tenant: str = ""
    reusable: Reusable | None = None  # what was last counted, while it waits
    refused_at: MemoryState | None = None  # the state of lanes and tree in which there was no memory for it
    has_started: bool = False
    is_waiting_to_load: bool = False  # because half of the lanes load already
    is_over: bool = False
    packed: bytes = field(init=False)
    shared: WeakKeyDictionary[Job, int] = field(default_factory=WeakKeyDictionary, init=False)  # tokens, by other request
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.packed = pack(self.generation.request.known_ids)

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.packed)

    @property
    def reuses(self) -> bool:
        """Whether the request may reuse state. One that scores its prompt computes all of it."""
        return not self.generation.request.scores_prompt

    @property
    def remaining(self) -> int:
        """Tokens that are still to be evaluated before the first one is chosen. The request must have a lane."""
        return self.num_tokens - self.generation.done_tokens

    @property
    def is_loading(self) -> bool:
        """Whether the request has a lane, and parts of its prefix are still being read from disk."""
        return self.generation.is_loading and self.generation.finish_reason is None

    @property
    def is_prefilling(self) -> bool:
        generation = self.generation
        return not (generation.is_prefilled or generation.is_loading or generation.is_done)

    @property
    def is_decoding(self) -> bool:
        generation = self.generation
        return generation.is_prefilled and generation.finish_reason is None

    @property
    def is_cancelled(self) -> bool:
        return self.generation.request.is_cancelled()

    def start(self, waited_s: float) -> None:
        with self._ending:  # a watchdog may fail the request at the same time, and nothing may follow that
            self.has_started = True
            if not self.is_over:
                self._tell(self.listener.on_start, self.generation.usage, waited_s)

    def loaded(self) -> None:
        with self._ending:
            if not self.is_over:
                self._tell(self.listener.on_loaded, self.generation.usage)

    def deliver(self, chunk: Chunk) -> None:
        with self._ending:
            if self.is_over:
                return
            try:
                self.listener.on_chunk(chunk)
            except Exception as error:
                self._end_by(error)

    def end(self, completion: Completion) -> None:
        if self._end_once():
            self._tell(self.listener.on_end, completion)

    def fail(self, error: BoughError) -> None:
        """Tell the listener. The watchdog calls this from its own thread while the engine is stuck."""
        if self._end_once():
            self._tell(self.listener.on_error, error)

    def _tell(self, tell: Callable[[*News], None], *news: *News) -> None:
        """Call the listener. If it raises, the error is logged and this request ends; the others go on."""
        try:
            tell(*news)
        except Exception as error:
            self._end_by(error)

    def _end_by(self, error: Exception) -> None:
        """Log what the listener has raised, and end the request."""
        log.exception("the listener of a request failed by a mistake of ours")
        if not self.is_over:
            self.is_over = True
            failure = EngineError(f"{type(error).__name__}: {error}")
            self._tell(self.listener.on_error, failure)

    def refuse(self, error: BoughError) -> bool:
        """Refuse a request that waits, from any thread; returns False if it has started or ended."""
        with self._ending:
            if self.has_started or self.is_over:
                return False
            self.is_over = True
        self._tell(self.listener.on_error, error)
        return True

    def _end_once(self) -> bool:
        with self._ending:
            was_over, self.is_over = self.is_over, True
        return not was_over
