"""A small world to play scenarios in: a fake engine, the real cache, and requests that are checked after every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bough.cache.prefix_cache import PrefixCache
from bough.cache.session import Session
from bough.cache.state import Group, Kind
from bough.types import Boundary
from tests import invariants
from tests.fakes import FakeEngine

CHUNK = 3


@dataclass
class Done:
    """What one request came to."""

    cached: int
    computed: int
    matched: int
    tokens: list[int]


class World:
    """Requests against one cache over the fake engine. Every step is followed by all the checks."""

    def __init__(
        self,
        groups: Sequence[Group],
        page_tokens: int = 2,
        *,
        num_lanes: int = 1,
        budget_bytes: int | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.engine = FakeEngine(groups)
        ticks = itertools.count(1)
        self.cache = PrefixCache(
            self.engine,
            [self.engine.make_lane() for _ in range(num_lanes)],
            budget_bytes=budget_bytes,
            page_tokens=page_tokens,
            clock=lambda: float(next(ticks)),
        )
        self.chunk = chunk
        self.sessions: list[Session] = []

    @property
    def is_full_only(self) -> bool:
        return all(group.kind is Kind.FULL for group in self.engine.groups)

    def check(self) -> None:
        invariants.check(self.cache, self.engine, self.sessions)

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
        return session

    def prefill_chunk(self, session: Session, max_tokens: int | None = None) -> bool:
        """One chunk; False when the prompt was done already."""
        chunk = session.next_chunk(max_tokens or self.chunk)
        if not chunk:
            return False
        with session.feeding(chunk):
            self.engine.evaluate(session.lane, chunk)
        session.publish()
        self.check()
        return True

    def prefill(self, session: Session) -> None:
        while self.prefill_chunk(session):
            pass

    def decode(self, session: Session, tokens: Sequence[int]) -> None:
        for token in tokens:
            with session.feeding([token]):
                self.engine.step([session.lane], [token])
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
        trie = self.cache.tries.get(salt)
        return trie.match(list(tokens)).length if trie else 0
