"""Where to capture the states of recurrent layers: as the library does, or at fixed distances, with the same budget.

The model has full attention, whose rows can be cut anywhere, and recurrent layers, which can be restored only where a state
was captured. A state takes the bytes of 1,536 tokens of rows; rows and states share one budget.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from bough.cache.record import POINT_SPACING
from bough.cache.session import Session
from bough.replay.engine import CountingEngine
from bough.replay.strategies import ReplayTree, StateCosts
from bough.replay.trace import Trace, TraceRequest
from bough.types import Mark

STATE_TOKENS = 1536
"""The tokens whose rows take as many bytes as one state."""


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
