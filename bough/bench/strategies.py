"""Caching strategies that the benchmarks compare: the tree, and two simpler ones behind the same interface.

`SingleEntry` keeps one sequence and cuts it back to the common prefix, as a plain runner does. `CopyPerConversation` keeps
up to ten whole sequences, shares nothing, and drops the least recently used first, as several servers do. All use the
same lanes and pages, so that only the strategy differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bough.cache.prefix_cache import PrefixCache
from bough.cache.tree.plan import LiveRows, plan
from bough.cache.tree.state import PAGE_TOKENS, Group, GroupSource, Kind, Lane, Page, PageStore, State, page_ranges
from bough.generate.reuse import Reuse
from bough.runtime import Runtime
from bough.tokens import Tokens, common_prefix, num_tokens
from bough.types import Loading

MAX_COPIES = 10
STRATEGIES = {"tree": "tree", "copies": "copy per conversation", "single": "single entry", "none": "no cache"}
"""The strategies, and their names in tables."""


class Strategy(Reuse, Protocol):
    """A caching strategy. `kept_bytes` are held for later requests, without those of lanes."""

    @property
    def kept_bytes(self) -> int: ...

    def clear(self) -> None: ...


class TreeStrategy(PrefixCache):
    """The prefix cache itself, as a strategy."""

    @property
    def kept_bytes(self) -> int:
        return self.memory.tree_bytes

    def clear(self) -> None:
        self.upkeep.clear()


class LaneSession:
    """A request on a lane of its own. `on_close` lets the strategy store the lane's state."""

    is_loading = False  # these strategies have no disk

    def __init__(self, lane: Lane, prompt: Tokens, cached: int, on_close: Callable[[LaneSession], None]) -> None:
        self.lane = lane
        self.matched = self.cached = self.loaded_tokens = cached
        self.loading = Loading()
        self.tokens = array("i", prompt[:cached].key)
        self._prompt = prompt
        self._on_close: Callable[[LaneSession], None] | None = on_close
        self.is_whole = True

    def advance_loading(self) -> bool:
        return False

    def wait_for_reads(self, timeout_s: float) -> None:
        """Does nothing: there is nothing to wait for."""

    def schedule(self, offset: int) -> None:
        """Does nothing: these strategies store a lane at its end, without restore points."""

    def next_chunk(self, max_tokens: int) -> Tokens:
        return self._prompt[len(self.tokens) : len(self.tokens) + max_tokens]

    @contextmanager
    def feeding(self, ids: Sequence[int]) -> Iterator[None]:
        self.begin_feed()
        yield
        self.tokens.frombytes(Tokens.of(ids).key)
        self.is_whole = True

    def begin_feed(self) -> None:
        self.is_whole = False

    def end_feed(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.is_whole = True

    def publish(self) -> None:
        """Does nothing: these strategies share nothing before the end."""

    def restart(self) -> None:
        raise AssertionError("the benchmarks use no model with a reuse limit")

    def reserve(self, total_tokens: int) -> bool:
        self.lane.reserve(total_tokens)
        return True

    def note_prefill(self, seconds: float) -> None:
        """Does nothing: these strategies never choose between loading and computing."""

    def close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(self)


class SingleEntry:
    """One sequence on one lane, cut back to the prefix that it shares with the next prompt."""

    kept_bytes = 0  # it holds nothing but the lane

    def __init__(self, store: PageStore, lane: Lane) -> None:
        self._groups = tuple(store.groups)
        self._lane = lane
        self._tokens = b""

    def begin(self, ids: Sequence[int], *, max_new_tokens: int = 0, **_: object) -> LaneSession:
        prompt = Tokens.of(ids)
        live = LiveRows.of(self._lane, common_prefix(self._tokens, prompt.key), self._groups)
        cached = plan(self._groups, [], 0, live, min(live.shared, len(ids) - 1))
        self._lane.reserve(len(ids) + max_new_tokens)
        self._lane.adopt(cached, {group: GroupSource(live=cached) for group in self._groups})
        return LaneSession(self._lane, prompt, cached, self._end)

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
    """Up to ten whole sequences, each a copy of its own. A longer sequence replaces the copy that it continues."""

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
        prompt = Tokens.of(ids)
        best = max(self._copies, key=lambda copy: self._usable(copy, prompt.key), default=None)
        cached = self._usable(best, prompt.key) if best else 0
        if best and cached:
            self._copies.remove(best)
            self._copies.append(best)
        self._lane.reserve(len(ids) + max_new_tokens)
        self._lane.adopt(cached, {group: self._source(best, group, cached) for group in self._groups})
        return LaneSession(self._lane, prompt, cached, self._end)

    def _usable(self, copy: _Copy, prompt: bytes) -> int:
        shared = min(common_prefix(copy.tokens, prompt), num_tokens(prompt) - 1)
        if all(group.kind is Kind.FULL for group in self._groups):
            return shared
        whole = num_tokens(copy.tokens)  # windows and recurrent states exist only at the end of a copy
        return whole if shared == whole else 0

    def _source(self, copy: _Copy | None, group: Group, cached: int) -> GroupSource:
        if copy is None or cached == 0:
            return GroupSource()
        pages = tuple(page for page in copy.pages.get(group, []) if page.start < cached)
        return GroupSource(pages=pages, state=copy.states.get(group))

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


def make_strategy(name: str, runtime: Runtime) -> Strategy:
    """A new strategy with its own lanes on the runtime's engine."""
    engine = runtime.engine
    if name == "single":
        return SingleEntry(engine, engine.make_lane())
    if name == "copies":
        return CopyPerConversation(engine, engine.make_lane())
    lanes = [engine.make_lane() for _ in runtime.prefix_cache.lanes.slots]
    budget_bytes = runtime.prefix_cache.residency.room.budget_bytes
    return TreeStrategy(engine, lanes, budget_bytes=budget_bytes, is_enabled=name == "tree")
