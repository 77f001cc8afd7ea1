"""One node of the tree: read it, keep it, evict it with all below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from bough.cache.admin.nodes import evict_node, keep_node, read_node
from bough.cache.steps import Steps, run_at_once
from bough.errors import NodeNotFound, RequestError
from bough.tokens import unpack
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World

Result = TypeVar("Result")
every_model = pytest.mark.parametrize("model", MODELS)


def run(start: Callable[[], Steps[Result]]) -> Result:
    return run_at_once(start)


def key_at(world: World, tokens: list[int], salt: str = "") -> int:
    """The key of the node in which these tokens end."""
    found = world.cache.forest.find(salt).match(tokens)
    assert found.length == len(tokens)
    return found.node.key


def test_a_node_is_read_with_the_tokens_that_lead_to_it() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([1, 2, 9])

    details = run(lambda: read_node(world.cache, "", key_at(world, [1, 2, 9])))
    head = run(lambda: read_node(world.cache, "", key_at(world, [1, 2])))

    assert unpack(details.path) == [1, 2, 9]
    assert (details.record.start, details.record.end, details.num_children) == (2, 3, 0)
    assert head.num_children == 2


def test_a_node_that_is_gone_is_not_found() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    key = key_at(world, [1, 2, 3, 4])
    world.cache.upkeep.clear()

    for call in (read_node, evict_node):
        with pytest.raises(NodeNotFound, match=f"no node {key}"):
            run(lambda call=call: call(world.cache, "", key))
    with pytest.raises(NodeNotFound):
        run(lambda: keep_node(world.cache, "nobody", key, True))


@every_model
def test_a_kept_node_is_kept_until_it_is_no_longer(model: str) -> None:
    world = World(MODELS[model], 2)
    tokens = world.run([1, 2, 3, 4], [5, 6]).tokens

    kept = run(lambda: keep_node(world.cache, "", key_at(world, tokens), True))
    assert kept.is_kept and world.cache.is_kept(tokens[: kept.end])
    let_go = run(lambda: keep_node(world.cache, "", key_at(world, tokens), False))

    assert kept.end == len(tokens) and not let_go.is_kept
    assert not world.cache.is_kept(tokens[: kept.end])
    world.check()


def test_an_edge_without_a_restore_point_cannot_be_kept_where_the_model_needs_one() -> None:
    world = World(MODELS["full+recurrent"], 2)
    world.run([1, 2, 3, 4, 5, 6])
    world.run([1, 2, 3, 4, 9, 9])
    node = world.cache.forest.find("").match([1, 2]).node
    for point in list(node.points.values()):
        world.cache.forest.find("").drop_point(node, point)

    with pytest.raises(RequestError, match="0 to 4 have no restore point"):
        run(lambda: keep_node(world.cache, "", node.key, True))


@every_model
@pytest.mark.parametrize("has_disk", [False, True])
def test_evicting_a_node_drops_it_and_all_below_it_also_on_disk_and_in_idle_lanes(model: str, has_disk: bool) -> None:
    disk = FakeDisk(2) if has_disk else None
    world = World(MODELS[model], 2, num_lanes=2, disk=disk)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 8, 8]):
        world.run(prompt, boundaries=[Boundary(2, Mark.SYSTEM_END)])
    if disk is not None:
        world.cache.upkeep.flush()

    done = run(lambda: evict_node(world.cache, "", key_at(world, [1, 2, 3])))

    assert (done.num_nodes, done.num_left) == (3, 0)
    assert world.cache.count_reusable([1, 2, 3, 4, 5, 9]) <= 2
    assert world.known([1, 2, 3, 4, 5]) == 2
    assert world.cache.count_reusable([1, 2, 8, 8, 9]) == 4
    world.check()
    if disk is not None:
        world.cache.upkeep.flush()
        again = World(MODELS[model], 2, disk=disk.restarted())
        assert again.cache.count_reusable([1, 2, 3, 4, 5, 9]) <= 2
        assert again.known([1, 2, 8, 8]) == 4


def test_what_a_running_request_uses_is_not_evicted() -> None:
    world = World(MODELS["full"], 2, num_lanes=2)
    world.run([1, 2, 3, 4])
    world.run([1, 2, 9])
    session = world.begin([1, 2, 3, 4, 5])

    done = run(lambda: evict_node(world.cache, "", key_at(world, [1, 2])))

    assert done.num_left == 2 and done.num_nodes == 1
    world.prefill(session)
    world.close(session)
    assert world.known([1, 2, 3, 4, 5]) == 5
    assert world.known([1, 2, 9]) == 2


def test_evicting_leaves_other_salts_alone() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4], salt="alice")
    world.run([1, 2, 3, 4])

    run(lambda: evict_node(world.cache, "alice", key_at(world, [1, 2], "alice")))

    assert world.known([1, 2, 3, 4], "alice") == 0
    assert world.known([1, 2, 3, 4]) == 4
