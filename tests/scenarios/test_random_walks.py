"""SCENARIOS.md 16: any sequence of operations keeps the invariants, and reuse is what a brute-force oracle says.

CI runs at least 3,000 steps of the stateful test; `pytest --slow` runs many more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from bough.cache.session import Session
from bough.cache.tree.state import Kind
from bough.errors import DoesNotFit, EngineError, LanesBusy
from bough.types import Boundary, Mark
from tests import invariants
from tests.fake_pool import PooledFakeEngine
from tests.fakes import MODELS
from tests.scenarios.world import World

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Several sessions at once over a small alphabet, so that prompts share, part and meet again."""

    num_steps = 0  # over all walks

    @initialize(
        model=st.sampled_from(list(MODELS)),
        page_tokens=st.sampled_from([2, 3, 8]),
        num_lanes=st.integers(1, 3),
        budget=st.sampled_from([None, 150, 400, 900]),
        is_pooled=st.booleans(),
    )
    def start(self, model: str, page_tokens: int, num_lanes: int, budget: int | None, is_pooled: bool = False) -> None:
        self.world = World(MODELS[model], page_tokens, num_lanes=num_lanes, budget_bytes=budget, is_pooled=is_pooled)
        self.open: list[Session] = []

    @rule(
        prompt=prompts,
        salt=st.sampled_from(["", "", "other"]),
        max_new=st.integers(0, 6),
        boundary=st.integers(1, 14),
        mark=st.sampled_from(Mark),
        keep=st.booleans(),
        extend=st.booleans(),
    )
    def begin(
        self, prompt: list[int], salt: str, max_new: int, boundary: int, mark: Mark, keep: bool, extend: bool
    ) -> None:
        if extend and self.open:
            prompt = self.open[-1].tokens.tolist() + prompt
        cache = self.world.cache
        oracle = invariants.reusable(cache, prompt, salt) if any(not slot.is_busy for slot in cache.lanes.slots) else 0
        boundaries = [Boundary(boundary, mark)] if boundary <= len(prompt) else []
        fits = self._fits(len(prompt) + max_new)
        try:
            session = self.world.begin(prompt, boundaries, salt, max_new, keep and len(prompt) < 6)
        except (EngineError, MemoryError):
            return
        except LanesBusy:
            assert all(slot.is_busy for slot in cache.lanes.slots)
            return
        except DoesNotFit:
            assert cache.residency.room.budget_bytes is not None
            return
        self._check_cached(session, oracle, fits)
        assert session.is_loading or session.tokens.tolist() == prompt[: session.cached]
        self.open.append(session)

    def _check_cached(self, session: Session, oracle: int, fits: bool) -> None:
        assert session.cached <= oracle
        assert session.cached == oracle or not fits

    def _fits(self, total_tokens: int) -> bool:
        """Whether any idle lane can grow to hold a request without any eviction."""
        room = self.world.cache.residency.room
        slots = [slot for slot in self.world.cache.lanes.slots if not slot.is_busy]
        growths = [slot.lane.nbytes + slot.lane.bytes_after_clear(total_tokens) for slot in slots]
        growths += [room.growth(slot, total_tokens) for slot in slots]
        return room.budget_bytes is None or room.used_bytes + max(growths, default=0) <= room.budget_bytes

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), size=st.integers(1, 5))
    def feed_prompt(self, which: int, size: int) -> None:
        session = self._session(which)
        if session is None:
            return
        with self._faults(session):
            self.world.prefill_chunk(session, size)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def finish_prompt(self, which: int) -> None:
        session = self._session(which)
        if session is None:
            return
        with self._faults(session):
            self.world.prefill(session)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), token=st.integers(0, 2))
    def decode(self, which: int, token: int) -> None:
        session = self._session(which)
        if session is None:
            return
        with self._faults(session):
            if session.offset >= session.prompt_tokens and session.reserve(session.offset + 1):
                self.world.decode(session, [token])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), offset=st.integers(1, 14))
    def capture(self, which: int, offset: int) -> None:
        session = self._session(which)
        if session is None:
            return
        if offset <= session.prompt_tokens:
            session.schedule(offset)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        session = self.open[which % len(self.open)]
        self.open.remove(session)
        self.world.close(session)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), groups_done=st.integers(0, 3))
    def fail(self, which: int, groups_done: int) -> None:
        session = self._session(which)
        if session is None:
            return
        chunk = session.next_chunk(2)
        if not chunk:
            return
        self.world.engine.fail_next, self.world.engine.fail_after_groups = "evaluate", groups_done
        self.world.engine.fail_with = EngineError
        with pytest.raises(EngineError), session, session.feeding(chunk):
            self.world.engine.evaluate(session.lane, chunk)
        self.open.remove(session)

    @rule(
        where=st.sampled_from(["publish", "capture", "cut", "join", "reserve", "adopt"]),
        error=st.sampled_from([EngineError, MemoryError]),
    )
    def arm_a_fault(self, where: str, error: type[Exception]) -> None:
        self.world.engine.fail_next, self.world.engine.fail_with = where, error

    @contextmanager
    def _faults(self, session: Session) -> Iterator[None]:
        """A fault may strike inside; a session whose lane is no longer whole is closed, as a caller would."""
        try:
            yield
        except (EngineError, MemoryError):
            if not session.is_whole:
                self.open.remove(session)
                self.world.close(session)

    @rule()
    def evict(self) -> None:
        with suppress(EngineError, MemoryError):
            self.world.cache.residency.evictor.evict_one()

    @rule(pick=st.integers(0, 1000))
    def lose_a_page(self, pick: int) -> None:
        tiers = [
            (trie, node, page)
            for trie in self.world.cache.forest.tries.values()
            for node in trie.walk()
            for group, pages in node.pages.items()
            if group.kind is Kind.FULL
            for page in pages
        ]
        if tiers:
            trie, node, page = tiers[pick % len(tiers)]
            trie.drop_page(node, page)

    @rule()
    def clear(self) -> None:
        with suppress(EngineError, MemoryError):
            self.world.cache.upkeep.clear()

    def _session(self, which: int) -> Session | None:
        """An open session whose lane can be used; None if it was refused while it loaded."""
        session = self.open[which % len(self.open)]
        try:
            self._finish_loading(session)
        except DoesNotFit:
            self._close_refused(session)
            return None
        return session

    def _close_refused(self, session: Session) -> None:
        """What could not be loaded has to be computed, in memory that a lane which shares rows had not reserved."""
        assert self.world.is_pooled
        self.open.remove(session)
        self.world.close(session)

    def _finish_loading(self, session: Session) -> None:
        """Nothing is read without a disk."""
        assert not session.is_loading

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "world"):
            CacheMachine.num_steps += 1
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.fail_next = None
            for session in self.open:
                self.world.close(session)
            self.world.cache.upkeep.clear()
            self.world.check()
            assert not self.world.engine.live
            assert_nothing_is_held(self.world)


def assert_nothing_is_held(world: World) -> None:
    """After everything was cleared, no slot is used, whoever may have used it."""
    assert world.cache.residency.room.used_bytes == 0
    if isinstance(world.engine, PooledFakeEngine):
        assert world.engine.arena.used_bytes == 0


def walk(machine: type[CacheMachine], num_walks: int, num_steps: int) -> None:
    """The same walks each time, for CI; at least 3,000 steps are made, or that is a failure."""
    before = CacheMachine.num_steps
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_walks,
            stateful_step_count=num_steps,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert CacheMachine.num_steps - before >= 3000


def walk_long(machine: type[CacheMachine]) -> None:
    """Many walks, other ones each time."""
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=3000, stateful_step_count=100, suppress_health_check=list(HealthCheck)),
    )


def test_random_walks_keep_every_invariant() -> None:
    walk(CacheMachine, num_walks=150, num_steps=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_random_walks_keep_every_invariant() -> None:
    walk_long(CacheMachine)


@pytest.mark.parametrize("model", MODELS)
def test_a_plain_walk_of_conversations_under_pressure(model: str) -> None:
    """Chats that grow, branch, are retried and cancelled, in a budget that holds about three of them."""
    chance = random.Random(16)
    row = sum(group.bytes_per_token for group in MODELS[model])
    states = sum(group.state_bytes for group in MODELS[model])
    w = World(MODELS[model], 4, num_lanes=3, budget_bytes=200 * row + 14 * states, chunk=7)
    system = [chance.randrange(60) for _ in range(9)]
    chats: list[list[int]] = [list(system) for _ in range(6)]
    for _ in range(250):
        chat = chance.choice(chats)
        if len(chat) > 40 or chance.random() < 0.1:
            del chat[chance.randrange(9, len(chat) + 1) :]
        chat += [chance.randrange(60) for _ in range(chance.randrange(1, 5))]
        session = w.begin(chat, [Boundary(9, Mark.SYSTEM_END)], max_new=4)
        while w.prefill_chunk(session):
            if chance.random() < 0.05:
                break
        else:
            reply = [chance.randrange(60) for _ in range(chance.randrange(4))]
            w.decode(session, reply)
            chat += reply
        w.close(session)
    w.cache.upkeep.clear()
    assert not w.engine.live
