"""A small world to play scenarios in: a fake engine, the real cache, and requests that are checked after every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bough.cache.admin.stats import Stats, stats
from bough.cache.prefix_cache import PrefixCache
from bough.cache.record import POINT_SPACING
from bough.cache.residency.memory import Tiers
from bough.cache.residency.rates import Rates
from bough.cache.session import Session
from bough.cache.tree.state import Group, Kind
from bough.types import Boundary
from tests import invariants
from tests.fake_pool import PooledFakeEngine
from tests.fakes import FakeEngine

CHUNK = 3


@dataclass
class Done:
    """What one request came to."""

    cached: int
    computed: int
    matched: int
    tokens: list[int]


def clear_idle_lanes(cache: PrefixCache) -> None:
    """After this only the tree holds what requests have left."""
    for slot in cache.lanes.idle():
        slot.clear()


def make_engine(groups: Sequence[Group], page_tokens: int, has_host: bool, is_pooled: bool, arena_bytes: int) -> FakeEngine:
    """A fake engine whose lanes copy rows, or share them in slots of `page_tokens`."""
    if is_pooled:
        return PooledFakeEngine(groups, page_tokens=page_tokens, has_host=has_host, arena_bytes=arena_bytes)
    return FakeEngine(groups, has_host=has_host)


class World:
    """Requests against one cache over an engine, by default the fake one. Every step is followed by all the checks."""

    num_visits, num_turns = 100, 50  # of the scenarios that go on for long
    is_pooled = False  # whether lanes share rows with the tree, if it is not said
    has_wide_window = False  # whether a lane's window buffer keeps more rows than the model needs

    def __init__(
        self,
        groups: Sequence[Group] = (),
        page_tokens: int = 2,
        *,
        num_lanes: int = 1,
        budget_bytes: int | None = None,
        chunk: int = CHUNK,
        engine: Any = None,
        is_pooled: bool | None = None,
        arena_bytes: int = 1 << 20,
        host_bytes: int = 0,
        disk: Any = None,
        shared: Any = None,
        rates: Rates | None = None,
        salt_share: float = 1.0,
        keeps_on_device: bool = True,
        ttl_s: float | None = None,
        point_spacing: int = POINT_SPACING,
    ) -> None:
        self.is_pooled = self.is_pooled if is_pooled is None else is_pooled
        self.engine: Any = engine or make_engine(groups, page_tokens, host_bytes > 0, self.is_pooled, arena_bytes)
        ticks = itertools.count(1)
        self.cache = PrefixCache(
            self.engine,
            [self.engine.make_lane() for _ in range(num_lanes)],
            budget_bytes=budget_bytes,
            page_tokens=page_tokens,
            clock=lambda: float(next(ticks)),
            wall=lambda: float(next(ticks)),
            tiers=Tiers(self.engine, host_bytes, disk, shared=shared) if host_bytes or disk or shared else None,
            rates=rates,
            salt_share=salt_share,
            keeps_on_device=keeps_on_device,
            ttl_s=ttl_s,
            point_spacing=point_spacing,
        )
        if disk is not None:
            self.cache.restore()
        if self.is_pooled:  # a lane keeps whole slots of its window; and what goes on for long was played with copies
            self.has_wide_window = page_tokens > 2 and all(group.kind is not Kind.RECURRENT for group in groups)
            self.num_visits = 40
        invariants.watch_evictions(self.cache)
        self.chunk = chunk
        self.sessions: list[Session] = []

    def set_budget(self, budget_bytes: int) -> None:
        self.cache.residency.room.budget_bytes = budget_bytes

    @property
    def row_and_state_bytes(self) -> tuple[int, int]:
        """Bytes of one token's rows in all groups, and of one recurrent state in all groups."""
        groups = self.engine.groups
        return sum(group.bytes_per_token for group in groups), sum(group.state_bytes for group in groups)

    def chats_bytes(self, num_chats: int, num_tokens: int, num_states: int) -> int:
        """What so many chats of that length take in the tree, with so many recurrent states of each group."""
        row, states = self.row_and_state_bytes
        return num_chats * num_tokens * row + num_states * states

    @property
    def is_full_only(self) -> bool:
        return all(group.kind is Kind.FULL for group in self.engine.groups)

    def stats(self) -> Stats:
        return stats(self.cache.forest, self.cache.residency)

    def check(self) -> None:
        invariants.check(self.cache, self.engine, self.sessions)

    def after_forward(self, session: Session, logits: Any) -> None:
        """Compare an answer; the fake engine compares its groups itself."""

    def begin(
        self,
        prompt: Sequence[int],
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        max_new: int = 0,
        keep: bool = False,
    ) -> Session:
        session = self.cache.begin(list(prompt), boundaries=boundaries, salt=salt, max_new_tokens=max_new, keep=keep)
        self.sessions = [each for each in self.sessions if not each.is_closed] + [session]
        self.check()
        self.load(session)
        return session

    def load(self, session: Session) -> None:
        """Wait until a session has read what it needs, unless disk or store are slow: then the test says when."""
        below = [tier for tier in (self.cache.memory.disk, self.cache.memory.shared) if tier is not None]
        if any(getattr(tier.reader, "is_slow", False) for tier in below):
            return
        try:
            session.finish_loading()
        except BaseException:
            session.close()
            raise
        self.check()

    def prefill_chunk(self, session: Session, max_tokens: int | None = None) -> bool:
        """One chunk; False when the prompt was done already."""
        chunk = session.next_chunk(max_tokens or self.chunk)
        if not chunk:
            return False
        with session.feeding(chunk):
            logits = self.engine.evaluate(session.lane, chunk)
        self.after_forward(session, logits)
        session.publish()
        self.check()
        return True

    def prefill(self, session: Session) -> None:
        while self.prefill_chunk(session):
            pass

    def decode(self, session: Session, tokens: Sequence[int]) -> None:
        for token in tokens:
            with session.feeding([token]):
                (logits,) = self.engine.step([session.lane], [token])
            self.after_forward(session, logits)
            self.check()

    def close(self, session: Session) -> None:
        session.close()
        self.check()

    def run(
        self,
        prompt: Sequence[int],
        reply: Sequence[int] = (),
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        keep: bool = False,
    ) -> Done:
        """A whole request; the last token of a reply is sampled but never fed, as in a real one."""
        session = self.begin(prompt, boundaries, salt, max_new=len(reply), keep=keep)
        before = len(self.engine.evaluated)
        self.prefill(session)
        computed = sum(self.engine.evaluated[before:])
        self.decode(session, reply[:-1])
        self.close(session)
        assert session.cached + computed == len(prompt)
        return Done(session.cached, computed, session.matched, session.tokens.tolist())

    def known(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many of these tokens the tree knows."""
        trie = self.cache.forest.tries.get(salt)
        return trie.match(list(tokens)).length if trie else 0
