"""SCENARIOS.md 16 over all places, and a day in miniature: budgets hold, nothing leaks, reuse is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from bough.cache import record
from bough.cache.session import Session
from bough.cache.tree.state import Tier
from bough.errors import DoesNotFit, EngineError, LanesBusy
from bough.tokens import unpack
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_random_walks import CacheMachine, prompts, walk, walk_long
from tests.scenarios.world import World, clear_idle_lanes


@pytest.fixture(autouse=True)
def short_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges count as long after a few tokens."""
    monkeypatch.setattr(record, "LONG_EDGE_TOKENS", 6)


class TierMachine(CacheMachine):
    """The walks of `CacheMachine` over a device, a host and a disk, with their faults, and with restarts.

    While the disk is slow, requests load over many steps: reads end in any order, late, damaged or never.
    """

    num_loaded = 0  # requests that took what they had waited for, over all walks
    num_recomputed = 0  # requests that were to compute what lies on disk, because that was estimated to be quicker

    @initialize(
        model=st.sampled_from(list(MODELS)),
        page_tokens=st.sampled_from([2, 3, 8]),
        num_lanes=st.integers(1, 3),
        budget=st.sampled_from([None, 150, 400, 900]),
        host=st.sampled_from([0, 64, 300, 5000]),
        disk=st.sampled_from([0, 200, 600, 1 << 30]),
        share=st.sampled_from([1.0, 1.0, 0.5]),
        is_pooled=st.booleans(),
    )
    def start(
        self,
        model: str,
        page_tokens: int,
        num_lanes: int,
        budget: int | None,
        is_pooled: bool = False,
        host: int = 0,
        disk: int = 0,
        share: float = 1,
    ) -> None:
        self.settings = {
            "num_lanes": num_lanes,
            "budget_bytes": budget,
            "host_bytes": host,
            "salt_share": share,
            "is_pooled": is_pooled,
        }
        self.model, self.page_tokens = model, page_tokens
        self.disk = FakeDisk(page_tokens, disk) if disk else None
        self._make_world()
        self.is_exact = share == 1.0  # else a salt may not store what it computed

    def _make_world(self) -> None:
        self.world = World(MODELS[self.model], self.page_tokens, disk=self.disk, **self.settings)  # type: ignore[arg-type]
        self.open = []

        self.now_s = 0.0
        self.world.cache.residency.loader.clock = lambda: self.now_s

    def _finish_loading(self, session: Session) -> None:
        if session.is_loading:
            self.world.engine.fail_next = None
            session.finish_loading()
            assert session.tokens.tobytes() == session.prompt[: session.cached].key

    def _check_cached(self, session: Session, oracle: int, fits: bool) -> None:
        TierMachine.num_recomputed += session.loading.recomputed_tokens > 0
        super()._check_cached(session, oracle, fits)

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

    @rule(is_slow=st.booleans())
    def slow_the_disk_down(self, is_slow: bool) -> None:
        """Reads end when the walk says so, or at once again."""
        if self.disk is not None:
            self.disk.reader.is_slow = is_slow

    @rule()
    def demote_everything(self) -> None:
        """Write all that waits, and move as much as goes to the lowest place."""
        if self.disk is None:
            return
        self.disk.work()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.evict_all_from(tier)
        clear_idle_lanes(self.world.cache)

    def evict_all_from(self, tier: Tier) -> None:
        for _ in range(20):
            self.evict_from(tier)

    @rule(prompt=prompts)
    def serve_a_whole_request(self, prompt: list[int]) -> None:
        before = len(self.open)
        self.begin(prompt, "", 0, 1, Mark.SYSTEM_END, False, True)
        if len(self.open) > before:
            self.finish_prompt(before)
        if len(self.open) > before:
            self.close(before)

    @rule(pick=st.integers(0, 1000), tail=prompts, max_new=st.integers(0, 3))
    def begin_what_is_known(self, pick: int, tail: list[int], max_new: int) -> None:
        """A prompt that goes on from something in the tree, while the disk is slow."""
        nodes = [node for node in self.world.cache.forest.find("").walk() if node.parent is not None]
        if self.disk is not None and nodes:
            path = nodes[pick % len(nodes)].path()
            self.demote_everything()
            self.disk.reader.is_slow = True
            known = [token for node in path for token in unpack(node.edge)]
            self.begin([*known, *tail[:2]], "", max_new, 1, Mark.SYSTEM_END, False, False)

    @rule(which=st.integers(0, 20))
    def finish_a_read(self, which: int) -> None:
        """Any of those under way, also if nobody wants it any more."""
        if self.disk is not None:
            self.disk.reader.finish(which)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def take_what_was_read(self, which: int) -> None:
        session = self.open[which % len(self.open)]
        if not session.is_loading:
            return
        try:
            is_loading = session.advance_loading()
        except (EngineError, MemoryError):  # the lane could not adopt
            self.open.remove(session)
            self.world.close(session)
            return
        except DoesNotFit:
            self._close_refused(session)
            return
        if not is_loading:
            TierMachine.num_loaded += 1
            assert session.tokens.tobytes() == session.prompt[: session.cached].key

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def let_time_pass(self, seconds: float) -> None:
        """Loads may be given up because nothing arrives."""
        self.now_s += seconds
        if self.disk is not None:
            self.disk.reader.now_s += seconds

    @rule(token_s=st.sampled_from([0.001, 0.1, 10.0]))
    def measure_the_prefill(self, token_s: float) -> None:
        """From now on it is known what computing takes: loads may be given up because they are slower."""
        self.world.cache.residency.loader.rates.note_prefill(0, 100, 100 * token_s)

    @rule(byte_s=st.sampled_from([1e-6, 10.0]))
    def measure_the_disk(self, byte_s: float) -> None:
        """From now on it is known what reading takes: what the disk has is computed where that is quicker."""
        self.world.cache.residency.loader.rates.note_load(Tier.DISK, 1, byte_s)

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
    walk(TierMachine, num_walks=100, num_steps=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_random_walks_over_all_places_keep_every_invariant() -> None:
    walk_long(TierMachine)


class LoadingWalk:
    """Steps of a `TierMachine` in proportions that keep the disk busy: most requests wait for what is being read.

    Hypothesis leaves whole rules out of a walk; loading needs many of them together.
    """

    def __init__(self, model: str, seed: int) -> None:
        self.chance = chance = random.Random(f"{model} {seed}")
        self.machine = machine = TierMachine()
        machine.start(
            model,
            chance.choice([2, 3, 8]),
            chance.randrange(2, 5),
            chance.choice([None, 400, 900, 2000]),
            bool(seed % 2),
            chance.choice([0, 0, 300, 5000]),
            chance.choice([600, 1 << 30]),
            chance.choice([1.0, 1.0, 0.5]),
        )
        draw = chance.randrange
        self.steps: dict[Callable[[], object], int] = {
            lambda: machine.serve_a_whole_request(self._tokens(14)): 20,
            lambda: machine.begin_what_is_known(draw(1000), self._tokens(2), draw(4)): 15,
            lambda: self._begin(): 5,
            lambda: machine.finish_a_read(draw(21)): 30,
            lambda: machine.open and machine.take_what_was_read(draw(3)): 30,
            lambda: self._use_a_session(): 12,
            lambda: machine.open and machine.close(draw(3)): 10,
            lambda: machine.let_time_pass(chance.choice([0.1, 1.0, 10.0])): 4,
            lambda: machine.measure_the_prefill(chance.choice([0.001, 0.1, 10.0])): 1,
            lambda: machine.measure_the_disk(chance.choice([1e-6, 10.0])): 2 * (seed % 3 == 0),
            lambda: machine.slow_the_disk_down(chance.random() < 0.8): 2,
            lambda: machine.arm_a_fault_of_the_disk(chance.choice(["read", "read", "write"])): 5,
            lambda: machine.arm_a_fault_of_moving(chance.choice(["to_host", "unpack"]), EngineError): 3,
            lambda: machine.arm_a_fault(chance.choice(["publish", "cut", "join", "reserve", "adopt"]), MemoryError): 3,
            lambda: machine.evict_from(chance.choice(list(Tier))): 8,
            lambda: machine.write(): 3,
            lambda: machine.clear(): 0.5,
            lambda: machine.restart(): 1,
        }

    def _tokens(self, most: int) -> list[int]:
        return [self.chance.randrange(3) for _ in range(self.chance.randrange(1, most + 1))]

    def _begin(self) -> None:
        chance = self.chance
        salt, mark = chance.choice(["", "other"]), chance.choice(list(Mark))
        self.machine.begin(self._tokens(14), salt, chance.randrange(6), chance.randrange(1, 14), mark, False, True)

    def _use_a_session(self) -> None:
        """One that does not load: the others wait on."""
        ready = [number for number, session in enumerate(self.machine.open) if not session.is_loading]
        if ready:
            which = self.chance.choice(ready)
            self.chance.choice([self.machine.finish_prompt, self._feed, self._decode])(which)

    def _feed(self, which: int) -> None:
        self.machine.feed_prompt(which, self.chance.randrange(1, 5))

    def _decode(self, which: int) -> None:
        self.machine.decode(which, self.chance.randrange(3))

    def run(self, num_steps: int) -> None:
        steps, weights = list(self.steps), list(self.steps.values())
        for step in self.chance.choices(steps, weights, k=num_steps):
            step()
            self.machine.all_holds()
        self.machine.teardown()


@pytest.mark.parametrize("model", MODELS)
def test_reads_may_end_in_any_order_late_damaged_or_never(model: str, request: pytest.FixtureRequest) -> None:
    num_walks, num_steps = (1000, 200) if request.config.getoption("--slow") else (12, 150)
    loaded_before, recomputed_before = TierMachine.num_loaded, TierMachine.num_recomputed
    for seed in range(num_walks):
        LoadingWalk(model, seed).run(num_steps)
    assert TierMachine.num_loaded - loaded_before > num_walks
    assert TierMachine.num_recomputed > recomputed_before


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
            session.finish_loading()
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
        assert not cache.forest.holds


@pytest.mark.parametrize(
    ("model", "num_requests"),
    [
        ("window+recurrent+full", 2_000),
        *(
            pytest.param(each, 7_000, marks=pytest.mark.slow)
            for each in ("full", "full+recurrent", "window+recurrent+full")
        ),
    ],
)
@pytest.mark.timeout(600)
def test_a_day_in_miniature_stays_within_every_budget(model: str, num_requests: int) -> None:
    """Everything is checked every 50th request, the budgets after each."""
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
    for number in range(num_requests):
        day.serve()
        if number % 3 == 0:
            disk.work()
        if number % 50 == 0:
            w.check()
    w.check()
    assert day.num_cancelled > num_requests // 70 and day.cached > day.computed / 2
    assert disk.counts.loaded_bytes > 0 and w.cache.residency.evictor.counts.host_bytes > 0
    w.cache.upkeep.clear()
    w.check()
    assert not w.engine.live and not disk.live
