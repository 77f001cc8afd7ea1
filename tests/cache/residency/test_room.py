"""Room: what is missing is told exactly, and as a rule without a look at the pages that lanes stand on."""

from __future__ import annotations

import random

import pytest

from bough.cache.residency import room as room_module
from bough.cache.tree.node import Hold, Node, Point
from bough.cache.tree.state import Kind, Page, Tier
from bough.errors import DoesNotFit
from tests.fakes import MODELS
from tests.scenarios.world import World

PAGE = 4


def held_bytes(w: World) -> int:
    """By brute force: bytes on the device that stay, because a lane stands on them."""
    total = 0
    for node, at in w.cache.forest.held_nodes().items():
        for item in node.items():
            if item.tier is Tier.DEVICE and _stays(node, at, item):
                total += item.nbytes
    return total


def _stays(node: Node, at: int, item: object) -> bool:
    if not isinstance(item, Page):
        point = next(point for point in node.points.values() if item in point.states.values())
        return point.offset <= at and not point.is_redundant
    users: set[Point | Hold] = item.users
    is_needed = any(not isinstance(user, Point) or not user.is_redundant for user in users)
    return item.start < at and (item.group.kind is Kind.FULL or is_needed)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("host_bytes", [0, 600])
def test_a_shortage_is_told_exactly(model: str, host_bytes: int) -> None:
    chance, seen = random.Random(model), set()
    w = World(MODELS[model], PAGE, num_lanes=3, budget_bytes=2500, host_bytes=host_bytes)
    room, open_sessions = w.cache.residency.room, []
    for _ in range(60):
        try:
            open_sessions.append(w.begin([chance.randrange(3) for _ in range(chance.randrange(2, 40))]))
        except DoesNotFit:
            w.close(open_sessions.pop(0))
        for session in open_sessions:
            w.prefill_chunk(session, chance.randrange(1, 12))
            busy = sum(slot.lane.nbytes for slot in w.cache.lanes.slots if slot.is_busy)
            for needed in (0, 100, 1000, 2000, 2500):
                missing = max(0, busy + held_bytes(w) + needed - 2500)
                assert room.shortage(needed) == missing
                seen.add(missing > 0)
        if len(open_sessions) == 3:
            w.close(open_sessions.pop(chance.randrange(3)))
    assert seen == {True, False}


@pytest.mark.parametrize(("salt_share", "is_pooled"), [(1.0, False), (0.9, False), (0.9, True)])
def test_a_chunk_that_needs_evictions_does_not_look_at_the_pages_that_it_stands_on(
    salt_share: float, is_pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 3200 if is_pooled else 6000  # where rows are shared, half as much is taken
    w = World(MODELS["full"], PAGE, num_lanes=2, budget_bytes=budget, salt_share=salt_share, is_pooled=is_pooled)
    for first in range(20):
        w.run([100 + first] * 20)
    session = w.begin(range(200))
    counted, find = [], room_module._rows
    monkeypatch.setattr(room_module, "_rows", lambda node, at: counted.append(node) or find(node, at))
    before = w.cache.residency.evictor.counts.tokens

    w.prefill(session)

    assert w.cache.residency.evictor.counts.tokens > before  # room had to be made
    assert session.sequence.hold.offset == 200 and not counted
