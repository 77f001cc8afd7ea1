"""Two machines and one store: what the first has computed, the second finds, whatever kinds of state the model has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bough.cache.tree.state import Group
from tests.fake_disk import FakeDisk
from tests.fake_store import FakeObjects, StepStore
from tests.fakes import MODELS
from tests.scenarios.world import World

PROMPT = list(range(1, 12))
PAGE = 2


def two_worlds(groups: Sequence[Group], **options: object) -> tuple[World, World, FakeObjects]:
    objects = FakeObjects()
    first = World(groups, shared=StepStore(objects, PAGE, owner="first"), **options)
    second = World(groups, shared=StepStore(objects, PAGE, owner="second"), **options)
    return first, second, objects


def shared(world: World) -> StepStore:
    store = world.cache.memory.shared
    assert isinstance(store, StepStore)
    return store


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_second_machine_serves_a_prompt_from_the_store(groups: Sequence[Group], is_pooled: bool) -> None:
    first, second, _ = two_worlds(groups, is_pooled=is_pooled)
    first.run(PROMPT, reply=[20, 21, 22])
    shared(first).work()

    done = second.run(PROMPT + [20, 21, 30, 31, 32])

    assert done.cached >= len(PROMPT) - 1
    assert done.tokens[: len(PROMPT)] == PROMPT
    assert shared(second).counts.loaded_bytes > 0
