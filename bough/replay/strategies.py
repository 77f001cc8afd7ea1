"""Caching strategies behind one interface: the real cache with any policy, and two simpler ones for comparison.

All have the same budget, in blocks. Evictions are counted in blocks of rows; states of recurrent layers do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bough.cache.prefix_cache import PrefixCache
from bough.cache.record import POINT_SPACING
from bough.cache.residency.policy import Policy
from bough.cache.session import Session
from bough.cache.tree.tokens import common_prefix, num_tokens, pack
from bough.replay.engine import PAGE_TOKENS, CountingEngine
from bough.replay.trace import TraceRequest

NEXT_TOKEN = -1
"""Stands for the rest of a prompt after its full blocks. It is never stored, so that every full block can be reused."""


@dataclass(frozen=True)
class StateCosts:
    """The cost of recurrent states: how many were captured, and their share of the held bytes.

    The share is taken after each request; this is the mean over all requests.
    """

    num_made: int
    share: float


class ReplayStrategy(Protocol):
    """A caching strategy that serves the requests of a trace."""

    @property
    def num_evicted(self) -> int:
        """The number of blocks evicted so far."""
        ...

    @property
    def state_costs(self) -> StateCosts | None:
        """The cost of recurrent states so far; None for a model without recurrent layers."""
        ...

    def serve(self, request: TraceRequest) -> int:
        """Serve a request. Returns the number of blocks of its prompt that were reused."""
        ...


class ReplayTree:
    """The real cache with an engine that only counts. Without a policy, the cache chooses between LRU and LRU-2 by itself.

    Unless another engine is given, the model has full attention only.
    """

    def __init__(
        self,
        budget: int,
        policy: Policy | None = None,
        engine: CountingEngine | None = None,
        point_spacing: int = POINT_SPACING,
    ) -> None:
        self._engine = engine or CountingEngine()
        self._now = 0.0
        self.cache = PrefixCache(
            self._engine,
            [self._engine.make_lane()],
            budget_bytes=budget,
            page_tokens=PAGE_TOKENS,
            policy=policy,
            clock=lambda: self._now,
            point_spacing=point_spacing,
        )

    @property
    def num_evicted(self) -> int:
        return self.cache.residency.evictor.counts.tokens

    @property
    def state_costs(self) -> StateCosts | None:
        return None

    def serve(self, request: TraceRequest) -> int:
        self._now = request.time_s
        prompt, num_new = [*request.prompt, NEXT_TOKEN], len(request.stored) - len(request.prompt)
        with self.cache.begin(prompt, boundaries=request.boundaries, max_new_tokens=num_new) as session:
            self.feed(session, request)
        session.sequence.slot.clear()  # a lane takes no bytes here, so it must not keep any state
        return session.cached

    def feed(self, session: Session, request: TraceRequest) -> None:
        """Evaluate the blocks that are not reused: first up to each scheduled capture, then to the end."""
        for end in sorted(session.captures):
            self.evaluate(session, request, end)
            session.publish()
        self.evaluate(session, request, len(request.stored))

    def evaluate(self, session: Session, request: TraceRequest, end: int) -> None:
        """Advance the session's lane to `end`."""
        blocks = request.stored[session.offset : end]
        with session.feeding(blocks):
            self._engine.evaluate(session.lane, len(blocks))


class ReplaySingleEntry:
    """Keeps only the last sequence, up to the budget, as a plain runner does."""

    state_costs = None

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = b""
        self.num_evicted = 0

    def serve(self, request: TraceRequest) -> int:
        reused = common_prefix(self._held, pack(request.prompt))
        stored = pack(request.stored[: self._budget])
        self.num_evicted += num_tokens(self._held) - common_prefix(self._held, stored)
        self._held = stored
        return reused


class ReplayCopies:
    """Keeps as many whole sequences as fit, each a copy of its own, and drops the least recently used first.

    A sequence that continues a copy replaces it. A sequence larger than the budget is cut.
    """

    state_costs = None

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._copies: dict[bytes, int] = {}  # sequence → number of blocks; least recently used first
        self._num_held = 0
        self.num_evicted = 0

    def serve(self, request: TraceRequest) -> int:
        prompt, stored = pack(request.prompt), pack(request.stored[: self._budget])
        best, reused = self._best(prompt)
        if reused:
            self._copies[best] = self._copies.pop(best)
        for old in [copy for copy in self._copies if stored.startswith(copy)]:
            self._num_held -= self._copies.pop(old)
        self._copies[stored] = num_tokens(stored)
        self._num_held += num_tokens(stored)
        while self._num_held > self._budget:
            self._drop_oldest()
        return reused

    def _best(self, prompt: bytes) -> tuple[bytes, int]:
        """The copy with the longest common prefix, and its length; of equals the most recent."""
        best, most = b"", 0
        for copy in self._copies:
            shared = common_prefix(copy, prompt)
            if shared >= most:
                best, most = copy, shared
        return best, most

    def _drop_oldest(self) -> None:
        size = self._copies.pop(next(iter(self._copies)))
        self._num_held -= size
        self.num_evicted += size
