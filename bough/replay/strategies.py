"""Caching strategies behind one interface: the real cache with any policy, and two simpler ones for comparison.

All have the same budget, in blocks. Evictions are counted in blocks of rows; states of recurrent layers do not count.

`PlacedTree` and `SpacedTree` are for a model with full attention, whose rows can be cut anywhere, and recurrent layers,
which can be restored only where a state was captured. Rows and states share the budget.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from bough.cache.prefix_cache import PrefixCache
from bough.cache.record import POINT_SPACING
from bough.cache.residency.policy import Key, Policy
from bough.cache.session import Session
from bough.cache.tree.node import Node
from bough.replay.engine import PAGE_TOKENS, CountingEngine
from bough.replay.trace import Trace, TraceRequest
from bough.tokens import common_prefix, cut, num_tokens, pack, unpack
from bough.types import Mark

STATE_TOKENS = 1536
"""The tokens whose rows take as many bytes as one state."""

NEXT_TOKEN = -1
"""Stands for the rest of a prompt after its full blocks. It is never stored, so that every full block can be reused."""


@dataclass(frozen=True)
class StateCosts:
    """The number of recurrent states that were captured, and their mean share of the held bytes after each request."""

    num_made: int
    share: float


class ReplayStrategy(Protocol):
    """A caching strategy that serves the requests of a trace.

    `num_evicted` counts blocks; `state_costs` are those of recurrent states, None for a model without recurrent layers.
    """

    @property
    def num_evicted(self) -> int: ...

    @property
    def state_costs(self) -> StateCosts | None: ...

    def serve(self, request: TraceRequest) -> int:
        """Serve a request, and return the number of blocks of its prompt that were reused."""


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
            self._engine.advance(session.lane, len(blocks))


class BeladyTree(ReplayTree):
    """The offline reference: the real cache with Belady's rule, which evicts the leaf whose next use is farthest away."""

    def __init__(self, budget: int, trace: Trace) -> None:
        super().__init__(budget, Policy(self._leaf_key))
        self._request = -1  # the number of the current one
        self._uses: dict[int, list[int]] = {}  # block → the numbers of the requests that use it
        for number, request in enumerate(trace.requests):
            for block in request.prompt:
                self._uses.setdefault(block, []).append(number)

    def serve(self, request: TraceRequest) -> int:
        self._request += 1
        return super().serve(request)

    def _leaf_key(self, node: Node) -> Key:
        """Evict the leaf whose last block has the latest next use, or none; of equals the deepest."""
        (last,) = unpack(cut(node.edge, -1))
        uses = self._uses.get(last, [])
        next_use = bisect_right(uses, self._request)
        return (-uses[next_use] if next_use < len(uses) else -math.inf, -node.end)


class PlacedTree(ReplayTree):
    """Captures states where the library does: at the end, at branches, at boundaries, and far apart in long prompts.

    The cache gets those boundaries of the trace that have one of the given marks.
    """

    def __init__(self, trace: Trace, budget: int, marks: Collection[Mark] = (Mark.SYSTEM_END,)) -> None:
        self._states = CountingEngine(state_bytes=max(1, STATE_TOKENS // trace.block_tokens))
        super().__init__(budget, engine=self._states, point_spacing=max(1, POINT_SPACING // trace.block_tokens))
        self._marks = marks
        self._num_served = 0
        self._sum_of_shares = 0.0

    @property
    def state_costs(self) -> StateCosts:
        return StateCosts(self._states.num_states_made, self._sum_of_shares / max(1, self._num_served))

    def serve(self, request: TraceRequest) -> int:
        known = tuple(boundary for boundary in request.boundaries if boundary.mark in self._marks)
        reused = super().serve(replace(request, boundaries=known))
        self._num_served += 1
        self._sum_of_shares += self._states.held_state_bytes / max(1, self.cache.memory.tree_bytes)
        return reused


class SpacedTree(PlacedTree):
    """Captures a state at every multiple of `spacing_tokens` and nowhere else; none of them is redundant.

    Rows beyond the last multiple could never be reused, so they are not stored: this is the best case of fixed spacing.
    """

    def __init__(self, trace: Trace, budget: int, spacing_tokens: int) -> None:
        super().__init__(trace, budget)
        self._spacing = max(1, spacing_tokens // trace.block_tokens)

    def feed(self, session: Session, request: TraceRequest) -> None:
        """Evaluate up to each multiple in turn. The session ends at a multiple, where the cache captures its last state."""
        session.captures.clear()
        first = session.offset // self._spacing * self._spacing + self._spacing
        for end in range(first, len(request.stored) + 1, self._spacing):
            session.schedule(end)
            self.evaluate(session, request, end)
            session.publish()


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
    """Keeps as many whole sequences as fit, without sharing, and drops the least recently used first.

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
        latest_first = reversed(self._copies)  # of equals the first is taken
        best = max(latest_first, key=lambda copy: common_prefix(copy, prompt), default=b"")
        if reused := common_prefix(best, prompt):
            self._copies[best] = self._copies.pop(best)
        for old in [copy for copy in self._copies if stored.startswith(copy)]:
            self._num_held -= self._copies.pop(old)
        self._copies[stored] = num_tokens(stored)
        self._num_held += num_tokens(stored)
        while self._num_held > self._budget:
            size = self._copies.pop(next(iter(self._copies)))
            self._num_held -= size
            self.num_evicted += size
        return reused
