"""Upkeep: a prefix is kept or no longer, a salt is cleared, and long works beside requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from bough.cache.admin.nodes import keep
from bough.cache.steps import Steps
from bough.errors import EngineError
from tests.cache.admin.donor import Imported, bring
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_random_walks import prompts, walk, walk_long
from tests.scenarios.test_tier_walks import TierMachine
from tests.scenarios.world import World

every_model = pytest.mark.parametrize("model", MODELS)
salts = st.sampled_from(["", "other"])


def make_world(model: str = "full", disk: FakeDisk | None = None, **options: int) -> World:
    return World(MODELS[model], 2, num_lanes=2, disk=disk, **options)  # type: ignore[arg-type]


# Keeping


@every_model
def test_the_end_of_a_prompt_with_its_answer_can_be_kept_and_let_go_again(model: str) -> None:
    world = make_world(model)
    tokens = world.run([1, 2, 3, 4], [5, 6]).tokens

    assert keep(world.cache, tokens, True)
    assert world.cache.is_kept(tokens)
    world.check()

    assert keep(world.cache, tokens, False)
    assert not world.cache.is_kept(tokens)
    world.check()


def test_full_attention_can_be_kept_in_the_middle_of_an_edge() -> None:
    world = make_world()
    world.run([1, 2, 3, 4, 5])

    assert keep(world.cache, [1, 2, 3], True)
    assert world.cache.is_kept([1, 2, 3])
    world.check()


def test_where_restore_points_are_needed_nothing_is_kept_between_them() -> None:
    world = make_world("recurrent")
    world.run([1, 2, 3, 4, 5, 6, 7])

    assert not keep(world.cache, [1, 2, 3], True)
    world.check()


@pytest.mark.parametrize("ids", [[], [9], [1, 2, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
def test_what_is_not_known_whole_cannot_be_kept(ids: list[int]) -> None:
    world = make_world()
    world.run([1, 2, 3, 4, 5])

    assert not keep(world.cache, ids, True)
    assert not keep(world.cache, ids, False)
    assert world.stats()["kept"] == 0


def test_what_another_salt_knows_cannot_be_kept() -> None:
    world = make_world()
    world.run([1, 2, 3, 4, 5], salt="other")

    assert not keep(world.cache, [1, 2, 3, 4, 5], True)
    assert list(world.cache.forest.tries) == ["other"]


def test_what_is_kept_outlives_what_is_not() -> None:
    world = make_world(budget_bytes=400)
    world.run([1, 2, 3, 4, 5, 6, 7, 8])
    assert keep(world.cache, [1, 2, 3, 4, 5, 6, 7, 8], True)

    for first in range(10, 40):
        world.run([first, 2, 3, 4, 5, 6, 7, 8])

    assert world.known([1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_what_is_kept_is_still_kept_after_a_restart() -> None:
    disk = FakeDisk(2)
    world = make_world(disk=disk)
    world.run([1, 2, 3, 4, 5, 6])
    keep(world.cache, [1, 2, 3, 4, 5, 6], True)
    world.cache.upkeep.flush()

    again = make_world(disk=disk.restarted())

    assert again.cache.is_kept([1, 2, 3, 4, 5, 6])


# Forgetting


@every_model
@pytest.mark.parametrize("has_disk", [False, True])
def test_a_salt_is_forgotten_everywhere_and_the_others_stay(model: str, has_disk: bool) -> None:
    disk = FakeDisk(2) if has_disk else None
    world = make_world(model, disk)
    for salt in ("mine", "yours"):
        world.run([1, 2, 3, 4, 5, 6], [7, 8], salt=salt)
    world.cache.upkeep.flush()

    world.cache.upkeep.clear("mine")
    world.check()

    assert list(world.cache.forest.tries) == ["yours"]
    assert world.cache.count_reusable([1, 2, 3, 4, 5, 6, 9], "mine") == 0
    assert world.cache.count_reusable([1, 2, 3, 4, 5, 6, 9], "yours") > 0
    if disk is not None:
        roots = {address.root for kept in (disk.platter.files, disk.platter.points) for address in kept}
        assert roots == {disk.root("yours")}
        assert list(make_world(model, disk.restarted()).cache.forest.tries) != []


def test_forgetting_a_salt_that_nobody_has_used_changes_nothing() -> None:
    world = make_world(disk=FakeDisk(2))
    world.run([1, 2, 3, 4])

    world.cache.upkeep.clear("nobody")
    world.check()

    assert world.known([1, 2, 3, 4]) == 4


def test_a_salt_that_an_earlier_run_left_on_disk_is_forgotten_though_nobody_has_named_it_since() -> None:
    disk = FakeDisk(2)
    make_world(disk=disk).run([1, 2, 3, 4], salt="mine")
    disk.work()
    world = make_world(disk=disk.restarted())
    assert world.cache.count_reusable([1, 2, 3, 4, 5], "mine") > 0

    world.cache.upkeep.clear("mine")
    world.check()

    assert not world.cache.forest.tries
    assert world.cache.count_reusable([1, 2, 3, 4, 5], "mine") == 0


@every_model
def test_what_a_request_stands_on_is_not_forgotten_under_its_feet(model: str) -> None:
    world = make_world(model, FakeDisk(2))
    world.run([1, 2, 3, 4, 5, 6], salt="mine")
    session = world.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="mine", max_new=4)

    world.cache.upkeep.clear("mine")
    world.check()

    world.prefill(session)
    world.decode(session, [3, 4])
    world.close(session)
    assert session.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4]


# Everything together


class UpkeepMachine(TierMachine):
    """The walks over all places, with upkeep in between."""

    @rule(prompt=prompts, kept=st.booleans(), salt=salts)
    def keep(self, prompt: list[int], kept: bool, salt: str) -> None:
        if keep(self.world.cache, prompt, kept, salt):
            assert self.world.cache.is_kept(prompt, salt) is kept

    def _make_world(self) -> None:
        super()._make_world()
        self.works: list[Steps[object]] = []  # under way; the process that did them may have died
        self.imports: list[tuple[str, Imported]] = []  # on disk, and not in the tree yet

    @rule(chats=st.lists(prompts, min_size=1, max_size=3), salt=salts, seed=st.integers(0, 9))
    def bring_an_import(self, chats: list[list[int]], salt: str, seed: int) -> None:
        """Somebody has put a part of another tree on disk; the tree takes it later."""
        if self.disk is not None:
            self.imports.append((salt, bring(self.disk, self.model, chats, salt, random.Random(seed))))

    @precondition(lambda self: self.imports)
    @rule(which=st.integers(0, 2))
    def attach_an_import(self, which: int) -> None:
        salt, imported = self.imports.pop(which % len(self.imports))
        self.world.cache.attach(salt, imported.files, imported.points)

    @precondition(lambda self: self.imports)
    @rule(which=st.integers(0, 2))
    def give_an_import_up(self, which: int) -> None:
        _, imported = self.imports.pop(which % len(self.imports))
        if self.disk is not None:
            self.disk.drop_unused(imported.files)

    @rule(salt=st.sampled_from([None, "", "other"]))
    def begin_to_clear(self, salt: str | None) -> None:
        self.works.append(self.world.cache.upkeep._clear(salt))

    @rule()
    def begin_to_save(self) -> None:
        self.works.append(self.world.cache.upkeep._save_all(None))

    @precondition(lambda self: self.works)
    @rule(which=st.integers(0, 2), num_steps=st.integers(1, 30))
    def go_on_with_a_work(self, which: int, num_steps: int) -> None:
        work = self.works[which % len(self.works)]
        for _ in range(num_steps):
            try:
                next(work)
            except (StopIteration, EngineError, MemoryError):
                self.works.remove(work)
                return

    @precondition(lambda self: self.works)
    @rule(which=st.integers(0, 2))
    def give_a_work_up(self, which: int) -> None:
        self.works.pop(which % len(self.works)).close()

    @invariant()
    def files_without_a_user_belong_to_an_import_under_way(self) -> None:
        if hasattr(self, "world") and self.disk is not None:
            unused = {file for file in self.disk.live.values() if file.num_users == 0}
            assert unused <= {file for _, imported in self.imports for file in imported.files}

    @rule(salt=salts)
    def forget(self, salt: str) -> None:
        try:
            self.world.cache.upkeep.clear(salt)
        except (EngineError, MemoryError):
            return
        is_used = any(session.sequence.trie.salt == salt for session in self.open)
        assert is_used or salt not in self.world.cache.forest.tries
        if self.disk is not None:
            assert not any(address.root == self.disk.root(salt) for address in self.disk.platter.points)


def test_random_walks_with_upkeep_keep_every_invariant() -> None:
    walk(UpkeepMachine, num_walks=100, num_steps=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_random_walks_with_upkeep_keep_every_invariant() -> None:
    walk_long(UpkeepMachine)
