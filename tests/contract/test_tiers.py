"""What every engine with a host place must do with pages and states that lie there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from bough.cache.tree.state import Group, GroupSource, Page, State, Tier
from bough.engines.contract import Engine
from tests.contract.conftest import WITH_HOST, EngineUnderTest, as_params
from tests.contract.driving import answer, give_back, is_close, items, keep, make_ids, new_lane, run
from tests.contract.test_engine_contract import LENGTH, LONG, recurrent_groups, row_groups


@pytest.fixture(scope="module", params=as_params(WITH_HOST))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    made = WITH_HOST[request.param](tmp_path_factory.mktemp("verdicts"))
    yield made
    made.engine.close()


@pytest.fixture
def engine(tested: EngineUnderTest) -> Engine:
    assert tested.engine.has_host
    return tested.engine


def kept_at(engine: Engine, offset: int, seed: int = 0) -> dict[Group, GroupSource]:
    lane = new_lane(engine, offset)
    run(engine, lane, make_ids(engine, offset, seed), [offset])
    return keep(engine, lane)


def packed(engine: Engine, what: Iterable[Page | State]) -> list[bytes]:
    return [bytes(engine.pack(item) or b"") for item in what]


def move_out(engine: Engine, kept: dict[Group, GroupSource]) -> list[Page | State]:
    for item in items(kept):
        engine.to_host(item)
    return items(kept)


def copy_to_host(engine: Engine, kept: dict[Group, GroupSource]) -> dict[Group, GroupSource]:
    """The same content once more, as if it came from disk."""
    copies = {}
    for group, source in kept.items():
        pages = [
            engine.unpack_page(group, page.start, page.end, packed(engine, [page])[0], Tier.HOST) for page in source.pages
        ]
        state = source.state and engine.unpack_state(
            group, source.state.offset, packed(engine, [source.state])[0], Tier.HOST
        )
        copies[group] = GroupSource(pages=tuple(pages), state=state)
    return copies


def test_moving_to_the_host_and_back_keeps_the_content(engine: Engine) -> None:
    kept = kept_at(engine, LONG)
    before = packed(engine, items(kept))
    sizes = [item.nbytes for item in items(kept)]

    moved = move_out(engine, kept)
    assert [item.tier for item in moved] == [Tier.HOST] * len(moved)
    assert packed(engine, moved) == before
    for item in moved:
        engine.to_device(item)

    assert packed(engine, moved) == before
    assert [item.nbytes for item in moved] == sizes
    assert [item.tier for item in moved] == [Tier.DEVICE] * len(moved)
    give_back(engine, kept)


def test_content_that_goes_to_and_fro_many_times_stays_as_it_was(engine: Engine) -> None:
    first, second = kept_at(engine, 60), kept_at(engine, 60, seed=1)
    before = packed(engine, [*items(first), *items(second)])

    for _ in range(5):
        for one, other in zip(items(first), items(second), strict=True):
            engine.to_host(one)
            engine.to_host(other)
            engine.to_device(one)  # its host memory goes to the next that comes
        for other in items(second):
            engine.to_device(other)

    assert packed(engine, [*items(first), *items(second)]) == before
    give_back(engine, first)
    give_back(engine, second)


def test_what_lies_on_the_host_is_part_of_what_the_engine_took_there(engine: Engine) -> None:
    kept = kept_at(engine, LONG)
    content = [item.nbytes for item in items(kept)]

    moved = move_out(engine, kept)

    assert engine.host_bytes() >= sum(item.nbytes for item in moved)
    assert all(item.nbytes >= size for item, size in zip(moved, content, strict=True))
    give_back(engine, kept)


@pytest.mark.parametrize("offset", [1, 5, 24, 256, 257, 290])
def test_a_lane_restored_from_the_host_goes_on_as_if_it_had_been_there(engine: Engine, offset: int) -> None:
    ids = make_ids(engine, LONG)
    kept = kept_at(engine, offset)
    moved = move_out(engine, kept)
    lane = new_lane(engine, LONG)

    lane.adopt(offset, kept)

    assert is_close(run(engine, lane, ids, [LONG - offset]), answer(engine, ids))
    assert [item.tier for item in moved] == [Tier.HOST] * len(moved)
    give_back(engine, kept)


def test_a_lane_is_restored_from_both_places_at_once(engine: Engine) -> None:
    ids = make_ids(engine, 1300)
    kept = kept_at(engine, 1290)
    for item in items(kept)[::2]:
        engine.to_host(item)
    lane = new_lane(engine, 1300)

    lane.adopt(1290, kept)

    assert is_close(run(engine, lane, ids, [10]), answer(engine, ids))
    give_back(engine, kept)


def test_pages_may_be_released_right_after_a_lane_was_restored_from_them(engine: Engine) -> None:
    ids = make_ids(engine, LONG)
    kept, other = kept_at(engine, 290), kept_at(engine, 290, seed=1)
    contents = packed(engine, items(other))
    move_out(engine, kept)
    lane = new_lane(engine, LONG)

    lane.adopt(290, kept)
    give_back(engine, kept)
    copied = copy_to_host(engine, other)  # into the memory that has just become free

    assert is_close(run(engine, lane, ids, [10]), answer(engine, ids))
    assert packed(engine, items(copied)) == contents
    give_back(engine, copied)
    give_back(engine, other)


def test_unpacking_on_the_host_is_exact(engine: Engine) -> None:
    ids = make_ids(engine, LONG)
    kept = kept_at(engine, 290)
    before = packed(engine, items(kept))

    unpacked = copy_to_host(engine, kept)

    assert packed(engine, items(unpacked)) == before
    assert all(item.tier is Tier.HOST for item in items(unpacked))
    lane = new_lane(engine, LONG)
    lane.adopt(290, unpacked)
    assert is_close(run(engine, lane, ids, [10]), answer(engine, ids))
    give_back(engine, kept)
    give_back(engine, unpacked)


def test_cutting_and_joining_on_the_host_gives_what_it_gives_on_the_device(tested: EngineUnderTest, engine: Engine) -> None:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, make_ids(engine, LENGTH), [LENGTH])

    for group in row_groups(tested):
        whole, left, right = (lane.publish(group, *rows) for rows in ((70, 90), (70, 77), (77, 90)))
        wanted = packed(engine, (left, right, whole))
        for page in (whole, left, right):
            engine.to_host(page)
        joined = engine.join(left, right)
        pieces = engine.cut(whole, 77)

        assert packed(engine, (*pieces, joined)) == wanted
        assert all(page.tier is Tier.HOST for page in (*pieces, joined))
        for page in (*pieces, joined):
            engine.release(page)


def test_pages_at_different_places_are_not_joined(tested: EngineUnderTest, engine: Engine) -> None:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, make_ids(engine, LENGTH), [LENGTH])

    for group in row_groups(tested):
        left, right = lane.publish(group, 70, 77), lane.publish(group, 77, 90)
        engine.to_host(left)
        with pytest.raises(AssertionError):
            engine.join(left, right)
        engine.release(left)
        engine.release(right)


def test_packed_content_stays_when_its_page_was_released_and_its_memory_could_be_used_again(engine: Engine) -> None:
    kept, other = kept_at(engine, 60), kept_at(engine, 60, seed=1)
    wanted = packed(engine, items(kept))
    views = [engine.pack(item) for item in move_out(engine, kept)]

    give_back(engine, kept)
    move_out(engine, other)
    contents = packed(engine, items(other))

    assert [bytes(view or b"") for view in views] == wanted != contents
    give_back(engine, other)


def test_what_was_released_has_no_content_to_pack(engine: Engine) -> None:
    kept = kept_at(engine, 60)
    give_back(engine, kept)

    assert [engine.pack(item) for item in items(kept)] == [None] * len(items(kept))


def test_another_thread_packs_while_content_moves_and_goes(engine: Engine) -> None:
    sets = [kept_at(engine, 60, seed) for seed in range(4)]
    wanted = {
        item: content for kept in sets for item, content in zip(items(kept), packed(engine, items(kept)), strict=True)
    }
    queue = list(wanted) * 20
    wrong: list[Page | State] = []

    def read_all() -> None:
        for item in queue:
            found = engine.pack(item)
            if found is not None and found != wanted[item]:
                wrong.append(item)

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(20):
        for item in wanted:
            engine.to_host(item)
        for item in wanted:
            engine.to_device(item)
    for kept in sets[1:]:
        give_back(engine, kept)
    others = [kept_at(engine, 60, seed=9) for _ in range(3)]
    for kept in others:
        move_out(engine, kept)
    reader.join()

    assert wrong == []
    for kept in (sets[0], *others):
        give_back(engine, kept)


def test_states_are_restored_from_the_host_at_exactly_their_offset(tested: EngineUnderTest, engine: Engine) -> None:
    if not recurrent_groups(tested):
        pytest.skip("the model has no recurrent layers")
    kept = kept_at(engine, 40)
    move_out(engine, kept)
    lane = new_lane(engine, 60)
    run(engine, lane, make_ids(engine, 60), [60])

    with pytest.raises(AssertionError):
        lane.adopt(39, {group: kept[group] if kept[group].state else GroupSource(live=39) for group in kept})
    give_back(engine, kept)
