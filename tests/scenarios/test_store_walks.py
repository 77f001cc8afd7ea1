"""Random walks over machines that share one store, with every fault that a store can have: the invariants hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bough.cache.session import Session
from bough.cache.store import StoreError
from bough.errors import EngineError
from bough.types import Mark
from tests.fake_disk import FakeDisk
from tests.fake_store import FakeObjects, StepStore
from tests.fakes import MODELS
from tests.scenarios.test_tier_walks import TierMachine
from tests.scenarios.world import World


class StoreMachine(TierMachine):
    """The steps of `TierMachine` on machines that come and go. Only one runs at a time; the objects stay."""

    def begin_walk(self, model: str, chance: random.Random, is_pooled: bool) -> None:
        self.objects, self.chance, self.num_machines = FakeObjects(), chance, 0
        self.is_exact = False
        self.model, self.page_tokens = model, chance.choice([2, 3, 8])
        self.settings = {
            "num_lanes": chance.randrange(2, 5),
            "budget_bytes": chance.choice([None, 400, 900, 2000]),
            "host_bytes": chance.choice([0, 0, 300, 5000]),
            "salt_share": chance.choice([1.0, 1.0, 0.5]),
            "is_pooled": is_pooled,
        }
        self.start_machine()

    def start_machine(self) -> None:
        """A machine with an empty tree and disk."""
        self.num_machines += 1
        self.store = StepStore(self.objects, self.page_tokens, owner=f"machine {self.num_machines}")
        self.disk = FakeDisk(self.page_tokens, self.chance.choice([600, 1 << 30]))
        self._make_world()

    def _make_world(self) -> None:
        options = {"disk": self.disk, "shared": self.store, **self.settings}
        self.world = World(MODELS[self.model], self.page_tokens, **options)
        self.open = []
        self.now_s = 0.0
        self.world.cache.residency.loader.clock = lambda: self.now_s

    def _check_cached(self, session: Session, oracle: int, fits: bool) -> None:
        """The store may have more than the oracle sees."""
        TierMachine.num_recomputed += session.loading.recomputed_tokens > 0

    def replace_the_machine(self) -> None:
        for session in self.open:
            self.world.close(session)
        self.store.work()
        self.start_machine()

    def clear(self) -> None:
        self.objects.fault = lambda call, key: None
        super().clear()

    def let_time_pass(self, seconds: float) -> None:
        super().let_time_pass(seconds)
        self.store.now += seconds
        self.store.reader.now_s += seconds

    def break_the_store(self) -> None:
        """From now on every now and then: a failed call, a flipped bit, a truncated or a swapped object."""
        chance, share = self.chance, self.chance.choice([0.0, 0.1, 0.5])

        def fault(call: str, key: str) -> None:
            if chance.random() < share / 3:
                raise StoreError("made to fail")

        def corrupt(key: str, content: bytes) -> bytes:
            if chance.random() >= share:
                return content
            at = chance.randrange(len(content))
            flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            other = self.objects.objects[chance.choice(list(self.objects.objects))][0]
            return chance.choice([flipped, content[:at], other])

        self.objects.fault, self.objects.corrupt = fault, corrupt

    def teardown(self) -> None:
        self.objects.fault = lambda call, key: None
        super().teardown()
        assert not self.objects.pages


class StoreWalk:
    """Steps of a `StoreMachine` in proportions that keep the store busy."""

    def __init__(self, model: str, seed: int) -> None:
        self.chance = chance = random.Random(f"store {model} {seed}")
        self.machine = machine = StoreMachine()
        machine.begin_walk(model, chance, bool(seed % 2))
        draw = chance.randrange
        self.chats = [[chance.randrange(2) for _ in range(30)] for _ in range(3)]
        self.steps: dict[Callable[[], object], int] = {
            lambda: machine.serve_a_whole_request(self._tokens()): 25,
            lambda: self._begin(): 15,
            lambda: machine.finish_a_read(draw(21)): 5,
            lambda: machine.store.reader.finish(draw(21)): 25,
            lambda: machine.open and machine.take_what_was_read(draw(3)): 30,
            lambda: machine.open and machine.finish_prompt(draw(3)): 8,
            lambda: machine.open and machine.close(draw(3)): 10,
            lambda: machine.let_time_pass(chance.choice([0.1, 1.0, 10.0])): 4,
            lambda: machine.measure_the_prefill(chance.choice([0.001, 0.1, 10.0])): 1,
            lambda: machine.measure_the_disk(chance.choice([1e-6, 10.0])): 2 * (seed % 3 == 0),
            lambda: self._slow_down(): 4,
            lambda: machine.break_the_store(): 3,
            lambda: machine.arm_a_fault_of_moving("unpack", EngineError): 3,
            lambda: machine.arm_a_fault(chance.choice(["publish", "cut", "join", "reserve", "adopt"]), MemoryError): 3,
            lambda: machine.arm_a_fault_of_the_disk(chance.choice(["read", "read", "write"])): 4,
            lambda: machine.slow_the_disk_down(chance.random() < 0.3): 2,
            lambda: machine.demote_everything(): 4,
            lambda: machine.evict(): 8,
            lambda: machine.store.work(): 10,
            lambda: machine.write(): 3,
            lambda: machine.clear(): 1,
            lambda: machine.replace_the_machine(): 6,
        }

    def _tokens(self) -> list[int]:
        """A part of one of a few conversations, and something new."""
        chat, num_new = self.chance.choice(self.chats), self.chance.randrange(3)
        return chat[: self.chance.randrange(4, 30)] + [self.chance.randrange(2) for _ in range(num_new)]

    def _begin(self) -> None:
        chance = self.chance
        salt, mark = chance.choice(["", "", "other"]), chance.choice(list(Mark))
        self.machine.begin(self._tokens(), salt, chance.randrange(6), chance.randrange(1, 14), mark, False, True)

    def _slow_down(self) -> None:
        self.machine.store.reader.is_slow = self.chance.random() < 0.6

    def run(self, num_steps: int) -> int:
        """Returns how many objects came from the store."""
        steps, weights, loaded = list(self.steps), list(self.steps.values()), dict[int, int]()
        for step in self.chance.choices(steps, weights, k=num_steps):
            step()
            self.machine.all_holds()
            loaded[self.machine.num_machines] = self.machine.store.counts.loaded
        self.machine.teardown()
        return sum(loaded.values())


@pytest.mark.parametrize("model", MODELS)
def test_machines_that_share_a_store_keep_every_invariant(model: str, request: pytest.FixtureRequest) -> None:
    num_walks, num_steps = (1000, 200) if request.config.getoption("--slow") else (8, 120)
    num_loaded = sum(StoreWalk(model, seed).run(num_steps) for seed in range(num_walks))
    assert num_loaded > num_walks
