"""The ways of remembering that the benchmarks compare with the tree, behind the same small interface.

`SingleEntry` is what a plain runner does: one sequence, cut back to the common prefix. `CopyPerConversation` is what
several servers do: up to ten whole sequences, least recently used out first, nothing shared. Both stand on the same lanes
and pages as the tree, so that only the way of remembering differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bough.cache.prefix_cache import PrefixCache
from bough.cache.record import page_ranges
from bough.cache.session import Reuse
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import PAGE_TOKENS, Group, Kind, Lane, Page, PageStore, Source, State
from bough.cache.tree.tokens import common_prefix, num_tokens, pack
from bough.runner import Runner
from bough.types import Loading

MAX_COPIES = 10
STRATEGIES = ("tree", "copies", "single", "none")


class Strategy(Reuse, Protocol):
    """A way of remembering that tells how many bytes it keeps for later, lanes left out."""

    @property
    def kept_bytes(self) -> int: ...

    def clear(self) -> None: ...


class TreeStrategy(PrefixCache):
    """The prefix cache itself, as a strategy."""

    @property
    def kept_bytes(self) -> int:
        return self.memory.tree_bytes


class LaneSession:
    """A request on one lane that nobody else uses. `on_close` keeps what the strategy wants to keep."""

    def __init__(self, lane: Lane, ids: Sequence[int], cached: int, on_close: Callable[[LaneSession], None]) -> None:
        self.lane = lane
        self.matched = self.cached = cached
        self.loading = Loading()
        self.tokens = array("i", ids[:cached])
        self._prompt = list(ids)
        self._on_close: Callable[[LaneSession], None] | None = on_close
        self.is_whole = True

    def schedule(self, offset: int) -> None:
        """Nothing to do: these strategies keep a lane as it is, not points of it."""

    def next_chunk(self, max_tokens: int) -> list[int]:
        return self._prompt[len(self.tokens) : len(self.tokens) + max_tokens]

    @contextmanager
    def feeding(self, ids: Sequence[int]) -> Iterator[None]:
        self.is_whole = False
        yield
        self.tokens.extend(ids)
        self.is_whole = True

    def publish(self) -> None:
        """Nothing is shared before the end."""

    def restart(self) -> None:
        raise AssertionError("the benchmarks use no model with a reuse limit")

    def reserve(self, total_tokens: int) -> bool:
        self.lane.reserve(total_tokens)
        return True

    def note_prefill(self, seconds: float) -> None:
        """There is nothing to choose between."""

    def close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(self)


class SingleEntry:
    """One sequence on one lane, cut back to what the next prompt shares with it."""

    kept_bytes = 0  # the lane is all there is

    def __init__(self, store: PageStore, lane: Lane) -> None:
        self._groups = tuple(store.groups)
        self._lane = lane
        self._tokens = b""

    def begin(self, ids: Sequence[int], *, max_new_tokens: int = 0, **_: object) -> LaneSession:
        prompt = pack(ids)
        live = Live.of(self._lane, common_prefix(self._tokens, prompt), self._groups)
        cached = plan(self._groups, [], 0, live, min(live.shared, len(ids) - 1))
        self._lane.reserve(len(ids) + max_new_tokens)
        self._lane.adopt(cached, {group: Source(live=cached) for group in self._groups})
        return LaneSession(self._lane, ids, cached, self._end)

    def _end(self, session: LaneSession) -> None:
        self._tokens = session.tokens.tobytes() if session.is_whole else b""
        if not session.is_whole:
            self._lane.clear()

    def clear(self) -> None:
        self._lane.clear()
        self._tokens = b""


@dataclass
class _Copy:
    """A whole sequence: its tokens, all its rows, and its states at the end."""

    tokens: bytes
    pages: dict[Group, list[Page]] = field(default_factory=dict)
    states: dict[Group, State] = field(default_factory=dict)

    @property
    def items(self) -> list[Page | State]:
        return [*(page for pages in self.pages.values() for page in pages), *self.states.values()]


class CopyPerConversation:
    """Up to ten whole sequences, each a copy of its own; a continued one replaces the sequence that it continues."""

    def __init__(self, store: PageStore, lane: Lane, max_copies: int = MAX_COPIES) -> None:
        self._store = store
        self._groups = tuple(store.groups)
        self._lane = lane
        self._max_copies = max_copies
        self._copies: list[_Copy] = []  # least recently used first

    @property
    def kept_bytes(self) -> int:
        return sum(item.nbytes for copy in self._copies for item in copy.items)

    def begin(self, ids: Sequence[int], *, max_new_tokens: int = 0, **_: object) -> LaneSession:
        prompt = pack(ids)
        best = max(self._copies, key=lambda copy: self._usable(copy, prompt), default=None)
        cached = self._usable(best, prompt) if best else 0
        if best and cached:
            self._copies.remove(best)
            self._copies.append(best)
        self._lane.reserve(len(ids) + max_new_tokens)
        self._lane.adopt(cached, {group: self._source(best, group, cached) for group in self._groups})
        return LaneSession(self._lane, ids, cached, self._end)

    def _usable(self, copy: _Copy, prompt: bytes) -> int:
        shared = min(common_prefix(copy.tokens, prompt), num_tokens(prompt) - 1)
        if all(group.kind is Kind.FULL for group in self._groups):
            return shared
        whole = num_tokens(copy.tokens)  # windows and recurrent states are kept as they were at the end
        return whole if shared == whole else 0

    def _source(self, copy: _Copy | None, group: Group, cached: int) -> Source:
        if copy is None or cached == 0:
            return Source()
        pages = tuple(page for page in copy.pages.get(group, []) if page.start < cached)
        return Source(pages=pages, state=copy.states.get(group))

    def _end(self, session: LaneSession) -> None:
        if not session.is_whole:
            self._lane.clear()
            return
        tokens = session.tokens.tobytes()
        for old in [copy for copy in self._copies if tokens.startswith(copy.tokens)]:
            self._drop(old)
        while len(self._copies) >= self._max_copies:
            self._drop(self._copies[0])
        self._copies.append(self._copy(tokens))

    def clear(self) -> None:
        self._lane.clear()
        for copy in list(self._copies):
            self._drop(copy)

    def _copy(self, tokens: bytes) -> _Copy:
        copy, end = _Copy(tokens), num_tokens(tokens)
        for group in self._groups:
            if group.kind is Kind.RECURRENT:
                copy.states[group] = self._lane.capture(group)
            else:
                ranges = page_ranges(group.first_needed(end), end, PAGE_TOKENS)
                copy.pages[group] = [self._lane.publish(group, low, high) for low, high in ranges]
        return copy

    def _drop(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        for item in copy.items:
            self._store.release(item)


def make_strategy(name: str, runner: Runner) -> Strategy:
    """A fresh strategy with lanes of its own on the runner's engine."""
    engine = runner.engine
    if name == "single":
        return SingleEntry(engine, engine.make_lane())
    if name == "copies":
        return CopyPerConversation(engine, engine.make_lane())
    lanes = [engine.make_lane() for _ in runner.prefix_cache.slots]
    return TreeStrategy(engine, lanes, budget_bytes=runner.prefix_cache.room.budget_bytes, is_enabled=name == "tree")


@contextmanager
def using(strategy: Strategy, runner: Runner) -> Iterator[None]:
    """Let the strategy, instead of the runner's tree, serve the requests inside this context."""
    before, runner.reuse = runner.reuse, strategy
    try:
        yield
    finally:
        runner.reuse = before
