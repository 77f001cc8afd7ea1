"""Lanes that share rows with the tree: memory is counted once, and evicting goes on until it is really free."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bough.cache.session import Session
from bough.cache.tree.state import Kind, Tier
from bough.errors import DoesNotFit
from tests.fakes import MODELS
from tests.scenarios.models import every_page, world
from tests.scenarios.test_loading import SlowWorld
from tests.scenarios.test_tiers import LONG, demote_all, tiers
from tests.scenarios.world import World

SLOT = 4 * 8  # bytes of a slot of four rows


def pooled(model: str = "full", page_tokens: int = 4, **settings: object) -> World:
    return World(MODELS[model], page_tokens, is_pooled=True, **settings)  # type: ignore[arg-type]


def used_slots(w: World) -> int:
    return int(w.engine.arena.used_bytes) // SLOT


def test_many_lanes_on_one_prefix_hold_it_once_and_their_own_tails() -> None:
    w = pooled(num_lanes=8)
    w.run(LONG)
    sessions = [w.begin([*LONG, 100 + number, 50]) for number in range(8)]
    for session in sessions:
        w.prefill(session)
    assert used_slots(w) == 8 + 8
    assert w.stats()["tree_bytes"] + w.stats()["lane_bytes"] == 16 * SLOT
    for session in sessions:
        w.close(session)


def test_conversations_that_rest_in_tree_and_lanes_are_counted_once() -> None:
    w = pooled(num_lanes=5)
    for first in range(5):
        w.run([100 + first, *LONG[:19]], [1, 2])
    assert used_slots(w) == 5 * 6
    assert w.cache.residency.room.used_bytes == 5 * 6 * SLOT and w.cache.lanes.nbytes == 0


@every_page
def test_a_branch_inside_a_page_copies_nothing_and_neighbours_in_two_blocks_stay_two_pages(page_tokens: int) -> None:
    w = world("pooled:full", page_tokens, num_lanes=2)
    w.run([1, 2, 3, 4, 5])
    w.run([1, 2, 3, 9, 9])
    w.run([1, 2, 3, 9, 9, 8])
    pages = [
        page for node in w.cache.forest.tries[""].match([1, 2, 3, 9, 9, 8]).path for page in node.pages[w.engine.groups[0]]
    ]
    assert [page.end for page in pages][-1] == 6
    assert len({page.block for page in pages}) == len({(page.start // page_tokens, page.block) for page in pages})
    assert any(left.block is not right.block for left, right in pairwise(pages))


def test_publishing_needs_no_room_in_a_full_budget() -> None:
    w = pooled(num_lanes=1, budget_bytes=8 * SLOT)
    session = w.begin(LONG)
    w.prefill(session)
    assert session.sequence.hold.offset == len(LONG)  # nothing was left out
    w.close(session)
    assert w.run(LONG).cached == 28  # the last token of the page would need another block


def test_evicting_goes_on_where_an_idle_lane_still_holds_what_was_evicted() -> None:
    w = pooled(num_lanes=3, budget_bytes=12 * SLOT)
    w.run([100, *LONG[:22]])
    w.run([101, *LONG[:22]])
    assert w.cache.lanes.nbytes == 0 and used_slots(w) == 12
    w.run([102, *LONG[:15]])
    assert w.known([102, *LONG[:15]]) == 16 and w.known([101, *LONG[:22]]) == 23


def test_idle_lanes_do_not_keep_demoted_content_on_the_device() -> None:
    """Else everything would be demoted in vain, one page after the other."""
    w = pooled(num_lanes=4, budget_bytes=20 * SLOT, host_bytes=100_000)
    for first in range(4):
        w.run([100 + first, *LONG[:18]])
    assert w.cache.residency.room.used_bytes <= 0.9 * 20 * SLOT
    assert tiers(w)[Tier.DEVICE] >= 14


def test_a_refusal_counts_each_block_once() -> None:
    w = pooled(num_lanes=3, budget_bytes=10 * SLOT)
    w.run(LONG[:16])
    sessions = [w.begin([*LONG[:16], 50 + number]) for number in range(2)]
    with pytest.raises(DoesNotFit) as refused:
        w.begin([90] * 20)
    assert refused.value.busy_bytes == (4 + 2) * SLOT and refused.value.can_wait
    for session in sessions:
        w.prefill(session)
        w.close(session)


def test_a_lane_that_starts_again_makes_room_for_what_the_tree_keeps() -> None:
    w = pooled(num_lanes=1, budget_bytes=20 * SLOT)
    session = w.begin(LONG, max_new=4)
    w.prefill(session)
    before = w.cache.residency.room.used_bytes
    session.restart()
    w.sessions = []
    assert w.cache.residency.room.used_bytes == before + 8 * SLOT
    with session.feeding(LONG[:20]):
        w.engine.evaluate(session.lane, LONG[:20])
    w.check()
    session.close()


def test_a_salts_share_counts_blocks() -> None:
    w = pooled(num_lanes=1, budget_bytes=40 * SLOT, salt_share=0.25)
    for first in range(6):
        session = w.begin([200 + first, *LONG[:17]], salt="greedy")
        while w.prefill_chunk(session):
            assert w.cache.forest.tries["greedy"].memory.num_bytes[Tier.DEVICE] <= 10 * SLOT
        w.close(session)
    assert w.known([205, *LONG[:17]], "greedy") == 18


@pytest.mark.parametrize("model", ["full", "full+window", "window+recurrent+full"])
def test_what_lies_on_the_host_is_copied_into_blocks_of_the_lane(model: str) -> None:
    w = pooled(model, num_lanes=2, host_bytes=10_000)
    w.run(LONG)
    demote_all(w)
    assert w.engine.arena.used_bytes == 0
    session = w.begin([*LONG, 60])
    assert session.cached == len(LONG) and session.lane.offset == len(LONG)
    w.prefill(session)
    w.close(session)


def test_what_is_read_to_the_device_has_whole_blocks_reserved() -> None:
    w = SlowWorld("full", is_pooled=True)
    w.run(LONG[:30])
    demote_all(w)
    session = w.begin([*LONG[:30], 60])
    assert w.cache.memory.reserved_bytes[Tier.DEVICE] == 8 * SLOT  # the last page has two rows
    w.read(session)
    assert session.cached == 30 and not any(w.cache.memory.reserved_bytes.values())


def test_a_page_that_is_cut_while_it_is_read_has_a_block_reserved_for_the_part_that_no_lane_brought() -> None:
    w = SlowWorld("full", is_pooled=True, num_lanes=2)
    w.run(LONG)
    w.disk.work()
    while w.cache.residency.evictor.evict_one():
        pass
    branching = w.begin([*LONG[:10], 99, 98])  # goes on from what its lane holds
    session = w.begin(LONG)
    assert w.cache.memory.reserved_bytes[Tier.DEVICE] == 8 * SLOT
    w.prefill(branching)
    session.advance_loading()
    assert w.cache.memory.reserved_bytes[Tier.DEVICE] == 6 * SLOT  # rows [0, 10) are in memory: the other lane had them
    w.read(session)
    assert session.cached == len(LONG) - 1
    w.close(session)
    w.close(branching)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("host_bytes", [0, 600])
def test_room_is_made_just_when_no_shortage_was_told(model: str, host_bytes: int) -> None:
    """And where there is a shortage, nothing is evicted."""
    chance, seen = random.Random(model), set[bool]()
    w = pooled(model, num_lanes=3, budget_bytes=1200, host_bytes=host_bytes)
    room, sessions = w.cache.residency.room, list[Session]()
    for _ in range(60):
        try:
            sessions.append(w.begin([chance.randrange(3) for _ in range(chance.randrange(2, 40))]))
        except DoesNotFit:
            if sessions:
                w.close(sessions.pop(0))
        for session in sessions:
            w.prefill_chunk(session, chance.randrange(1, 12))
        needed, before = chance.choice([100, 400, 700, 1100]), (room.used_bytes, tiers(w))
        is_short = room.shortage(needed) > 0
        assert room.make_room(needed) is not is_short
        assert not is_short or (room.used_bytes, tiers(w)) == before
        w.check()
        seen.add(is_short)
        if len(sessions) == 3:
            w.close(sessions.pop(chance.randrange(3)))
    assert seen == {True, False}


def test_a_window_keeps_its_room_however_much_of_it_is_published() -> None:
    w = pooled("full+window", num_lanes=1, budget_bytes=4000)
    session = w.begin(list(range(60)), max_new=10)
    for at in range(3, 60, 3):
        session.schedule(at)
    room = w.cache.residency.room
    while w.prefill_chunk(session):
        assert room.used_bytes <= 4000
    group = next(group for group in w.engine.groups if group.kind is Kind.WINDOW)
    pages = [page for node in session.sequence.hold.node.path() for page in node.pages[group]]
    assert len({page.block for page in pages}) == 15
    w.close(session)
