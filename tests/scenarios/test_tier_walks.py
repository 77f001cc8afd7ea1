"""SCENARIOS.md 16 over all places, and a day in miniature: budgets hold, nothing leaks, reuse is right."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from bough.cache import record
from bough.cache.tree.state import Tier
from bough.errors import DoesNotFit, EngineError, LanesBusy
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_random_walks import CacheMachine, walk, walk_long
from tests.scenarios.world import World


@pytest.fixture(autouse=True)
def short_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges count as long after a few tokens."""
    monkeypatch.setattr(record, "LONG_EDGE_TOKENS", 6)


class TierMachine(CacheMachine):
    """The walks of `CacheMachine` over a device, a host and a disk, with their faults, and with restarts."""

    @initialize(
        model=st.sampled_from(list(MODELS)),
        page_tokens=st.sampled_from([2, 3, 8]),
        num_lanes=st.integers(1, 3),
        budget=st.sampled_from([None, 150, 400, 900]),
        host=st.sampled_from([0, 64, 300, 5000]),
        disk=st.sampled_from([0, 200, 600, 1 << 30]),
        share=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def start(
        self,
        model: str,
        page_tokens: int,
        num_lanes: int,
        budget: int | None,
        host: int = 0,
        disk: int = 0,
        share: float = 1,
    ) -> None:
        self.settings = {"num_lanes": num_lanes, "budget_bytes": budget, "host_bytes": host, "salt_share": share}
        self.model, self.page_tokens = model, page_tokens
        self.disk = FakeDisk(page_tokens, disk) if disk else None
        self._make_world()
        self.is_exact = share == 1.0  # else a salt may not store what it computed

    def _make_world(self) -> None:
        self.world = World(MODELS[self.model], self.page_tokens, disk=self.disk, **self.settings)  # type: ignore[arg-type]
        self.open = []

    def _fits(self, total_tokens: int) -> bool:
        """With a disk, what is read back needs room as well: more than can be told here."""
        return self.is_exact and self.disk is None and super()._fits(total_tokens)

    @rule()
    def write(self) -> None:
        if self.disk is not None:
            self.disk.work()

    @rule(fault=st.sampled_from(["read", "write"]))
    def arm_a_fault_of_the_disk(self, fault: str) -> None:
        if self.disk is not None:
            self.disk.fail_next = fault

    @rule(where=st.sampled_from(["to_host", "unpack"]), error=st.sampled_from([EngineError, MemoryError]))
    def arm_a_fault_of_moving(self, where: str, error: type[Exception]) -> None:
        self.world.engine.fail_next, self.world.engine.fail_with = where, error

    @rule(is_full=st.booleans())
    def fill_the_disk(self, is_full: bool) -> None:
        if self.disk is not None:
            self.disk.is_full = is_full

    @rule(tier=st.sampled_from(list(Tier)))
    def evict_from(self, tier: Tier) -> None:
        with suppress(EngineError, MemoryError):
            self.world.cache.residency.evictor.evict_one(tier)

    @rule()
    def restart(self) -> None:
        """The process dies: lanes, memory and what was not written are gone."""
        if self.disk is not None:
            self.disk = self.disk.restarted()
            self._make_world()


def test_random_walks_over_all_places_keep_every_invariant() -> None:
    walk(TierMachine, num_walks=300, num_steps=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_random_walks_over_all_places_keep_every_invariant() -> None:
    walk_long(TierMachine)


class Day:
    """Traffic of many users: chats that grow, branch and are retried, agents that resend instructions, cancellations."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.systems = [self._tokens(self.chance.randrange(4, 20)) for _ in range(4)]
        self.chats: list[tuple[str, list[int]]] = []
        self.num_requests = self.num_cancelled = self.num_refused = 0
        self.cached = self.computed = 0

    def _tokens(self, length: int) -> list[int]:
        return [self.chance.randrange(60) for _ in range(length)]

    def _next(self) -> tuple[str, list[int]]:
        chance = self.chance
        if len(self.chats) < 40 or chance.random() < 0.05:
            self.chats.append((chance.choice(["", "", "team"]), list(chance.choice(self.systems))))
            del self.chats[:-60]
        salt, chat = chance.choice(self.chats[-12:] if chance.random() < 0.6 else self.chats)
        if len(chat) > 70 or chance.random() < 0.1:
            del chat[chance.randrange(4, len(chat) + 1) :]
        chat += self._tokens(chance.randrange(1, 9))
        return salt, chat

    def serve(self) -> None:
        """One request, with all cheap checks after it."""
        salt, chat = self._next()
        cache, engine, chance = self.world.cache, self.world.engine, self.chance
        self.num_requests += 1
        try:
            session = cache.begin(chat, salt=salt, max_new_tokens=6, boundaries=[Boundary(4, Mark.SYSTEM_END)])
        except (DoesNotFit, LanesBusy):
            self.num_refused += 1
            return
        with session:
            while chunk := session.next_chunk(chance.randrange(1, 24)):
                with session.feeding(chunk):
                    engine.evaluate(session.lane, chunk)
                session.publish()
                assert cache.residency.room.used_bytes <= cache.residency.room.budget_bytes
                if chance.random() < 0.03:
                    self.num_cancelled += 1
                    break
            else:
                for token in self._tokens(chance.randrange(5)):
                    with session.feeding([token]):
                        engine.step([session.lane], [token])
                    chat.append(token)
            self.cached += session.cached
            self.computed += session.offset - session.cached
        self.check_budgets()

    def check_budgets(self) -> None:
        cache = self.world.cache
        assert cache.residency.room.used_bytes <= cache.residency.room.budget_bytes
        assert cache.memory.num_bytes[Tier.HOST] <= cache.memory.tiers.host_bytes
        assert cache.memory.disk.claimed_bytes <= cache.memory.disk.budget_bytes
        assert not cache.forest.pins


@pytest.mark.parametrize(
    "model", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("full", "full+recurrent")), "window+recurrent+full"]
)
@pytest.mark.timeout(600)
def test_a_day_in_miniature_stays_within_every_budget(model: str) -> None:
    """At least 20,000 requests over all three models; everything is checked every 50th, the budgets after each."""
    row, state = (sum(getattr(group, name) for group in MODELS[model]) for name in ("bytes_per_token", "state_bytes"))
    disk = FakeDisk(8, 600 * row + 60 * state)
    w = World(
        MODELS[model],
        8,
        num_lanes=3,
        budget_bytes=300 * row + 20 * state,
        host_bytes=200 * row + 20 * state,
        disk=disk,
        salt_share=0.8,
    )
    day = Day(w, seed=7)
    for number in range(7_000):
        day.serve()
        if number % 3 == 0:
            disk.work()
        if number % 50 == 0:
            w.check()
    w.check()
    assert day.num_cancelled > 100 and day.cached > day.computed / 2
    assert disk.counts.loaded_bytes > 0 and w.cache.residency.evictor.counts.host_bytes > 0
    w.cache.clear()
    w.check()
    assert not w.engine.live and not disk.live
