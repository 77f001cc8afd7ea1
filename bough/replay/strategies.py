"""Ways of remembering, behind one small interface: the real cache with any policy, and two simpler ways for comparison.

All have the same budget, in blocks. What they let go is counted in blocks too.
"""

from __future__ import annotations

from typing import Protocol

from bough.cache.eviction import Policy
from bough.cache.prefix_cache import PrefixCache
from bough.cache.tokens import common_prefix, num_tokens, pack
from bough.replay.engine import PAGE_TOKENS, CountingEngine
from bough.replay.request import Request

NEXT_TOKEN = -1
"""Stands for what a prompt has beyond its full blocks. It is never stored: every full block of a prompt can be reused."""


class Strategy(Protocol):
    """Something that serves requests and remembers."""

    @property
    def num_evicted(self) -> int:
        """Blocks that were let go so far."""
        ...

    def serve(self, request: Request) -> int:
        """Serve a request; returns how many blocks of its prompt were reused."""
        ...


class Tree:
    """The cache that the library runs, over an engine that only counts. Without a policy, the duel decides."""

    def __init__(self, budget: int, policy: Policy | None = None) -> None:
        self._engine = CountingEngine()
        self._now = 0.0
        self.cache = PrefixCache(
            self._engine,
            [self._engine.make_lane()],
            budget_bytes=budget,
            page_tokens=PAGE_TOKENS,
            policy=policy,
            clock=lambda: self._now,
        )

    @property
    def num_evicted(self) -> int:
        return self.cache.memory.counts.tokens

    def serve(self, request: Request) -> int:
        self._now = request.time_s
        max_new_tokens = len(request.stored) - len(request.prompt)
        with self.cache.begin([*request.prompt, NEXT_TOKEN], max_new_tokens=max_new_tokens) as session:
            rest = request.stored[session.cached :]
            with session.feeding(rest):
                self._engine.evaluate(session.lane, len(rest))
        self.cache.room.clear_slot(session.slot)  # a lane that costs nothing must not remember anything
        return session.cached


class SingleEntry:
    """The last sequence alone, as far as the budget reaches: what a plain runner does."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = b""
        self.num_evicted = 0

    def serve(self, request: Request) -> int:
        reused = common_prefix(self._held, pack(request.prompt))
        stored = pack(request.stored[: self._budget])
        self.num_evicted += num_tokens(self._held) - common_prefix(self._held, stored)
        self._held = stored
        return reused


class Copies:
    """Whole sequences, each a copy of its own, as many as fit; the least recently used goes first.

    A sequence that continues a copy takes its place. One that is larger than the budget is cut.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._copies: dict[bytes, int] = {}  # how many blocks each has; least recently used first
        self._num_held = 0
        self.num_evicted = 0

    def serve(self, request: Request) -> int:
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
        """The copy that shares most with a prompt, and how much; of equals the most recent."""
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
