"""What is computed although the disk has it, because that was estimated to be quicker, is in memory afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from bough.cache.tree.state import Kind, Tier
from tests.fake_disk import FakeDisk
from tests.fake_store import FakeObjects, StepStore
from tests.fakes import MODELS, FixedRates
from tests.scenarios.models import every_model, world
from tests.scenarios.test_tiers import LONG, OTHER, demote_all, tiers
from tests.scenarios.world import World, clear_idle_lanes

ROW = 8  # bytes of a token's rows in the fake model with full attention


def slow_disk() -> FixedRates:
    """Reading a byte takes longer than computing a prompt."""
    return FixedRates(0.001, {Tier.DISK: 1.0})


def on_disk(model: str = "full", **options: Any) -> World:
    """A world that has LONG on disk alone, as after a start, and computes it all the same."""
    disk = FakeDisk(4)
    World(MODELS[model], 4, disk=disk).run(LONG)
    disk.work()
    w = World(MODELS[model], 4, **({"disk": disk.restarted(), "rates": slow_disk()} | options))
    assert tiers(w)[Tier.DEVICE] == tiers(w)[Tier.HOST] == 0 < tiers(w)[Tier.DISK]
    return w


@every_model
def test_a_turn_after_the_one_that_was_computed_finds_everything_in_memory(model: str) -> None:
    disk = FakeDisk(4)
    w = world(model, 4, disk=disk, rates=slow_disk())
    first = w.run(LONG, reply=[1, 2])
    demote_all(w)

    second = w.run([*first.tokens, 50, 51, 52], reply=[3, 4])
    w.run(OTHER)  # takes the lane
    third = w.run([*second.tokens, 53, 54])

    has_rows = any(group.kind is not Kind.RECURRENT for group in w.engine.groups)  # a state alone is always loaded
    assert second.matched == len(first.tokens) and (second.cached == 0) == has_rows
    assert third.cached == len(second.tokens)
    assert (disk.counts.loaded_bytes == 0) == has_rows


@pytest.mark.usefixtures("lane_kind")
@pytest.mark.parametrize("host_bytes", [0, 10_000])
@pytest.mark.parametrize("model", MODELS)
def test_another_branch_finds_what_was_computed_in_memory(model: str, host_bytes: int) -> None:
    w = on_disk(model, host_bytes=host_bytes)

    assert w.run([*LONG[:22], 50, 51]).cached == 0
    w.run(OTHER)

    assert w.run([*LONG[:22], 60, 61]).cached == 22


@pytest.mark.usefixtures("lane_kind")
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_written_twice(model: str) -> None:
    w = on_disk(model)
    disk, held = w.cache.memory.disk, tiers(w)

    assert w.run(LONG).cached == 0
    assert not disk.pending and tiers(w)[Tier.DEVICE] > 0
    demote_all(w)

    assert not disk.pending and not disk.deleting
    assert tiers(w) == held


def test_nothing_is_sent_to_the_store_twice() -> None:
    objects = FakeObjects()
    store = StepStore(objects, 4, owner="one")
    disk = FakeDisk(4)
    w = World(MODELS["full"], 4, disk=disk, shared=store, rates=slow_disk())
    w.run(LONG)
    store.work()
    demote_all(w)
    sent = store.counts.sent
    assert sent > 0

    assert w.run(LONG).cached == 0
    store.work()

    assert store.counts.sent == sent and tiers(w)[Tier.DISK] == 0


@pytest.mark.usefixtures("lane_kind")
def test_a_request_that_is_not_stored_leaves_the_tree_as_it_was() -> None:
    w = on_disk()
    with w.cache.begin(LONG, keep_state=False) as session:
        w.prefill(session)
    w.check()
    assert tiers(w)[Tier.DEVICE] == 0


@pytest.mark.usefixtures("lane_kind")
def test_what_a_cancelled_request_computed_is_in_memory() -> None:
    w = on_disk()
    session = w.begin(LONG)
    for _ in range(4):
        w.prefill_chunk(session)
    w.close(session)
    assert tiers(w)[Tier.DEVICE] == 2  # of the eight tokens that were computed


def test_what_does_not_fit_stays_on_disk_and_new_rows_come_first() -> None:
    w = on_disk(budget_bytes=100 * ROW)
    w.set_budget((len(LONG) + 8 + 24) * ROW)  # the lane, the new rows, and as much as six pages

    done = w.run([*LONG, *range(70, 78)])

    assert w.known(done.tokens) == len(LONG) + 8  # nothing of what is new was left out
    assert tiers(w)[Tier.DISK] == 4 and tiers(w)[Tier.DEVICE] == 6
    w.run(OTHER[:8])
    assert w.begin([*LONG, 70]).cached == 16  # what is deeper was evicted for the other chat, or lies on disk


def test_without_memory_in_the_engine_rows_stay_on_disk() -> None:
    w = on_disk()
    w.engine.fail_next, w.engine.fail_with = "publish", MemoryError

    w.run(LONG)
    assert w.engine.fail_next is None
    clear_idle_lanes(w.cache)

    assert w.run(LONG).cached > 0


@pytest.mark.usefixtures("lane_kind")
@pytest.mark.parametrize("host_bytes", [0, 10_000])
@pytest.mark.parametrize("model", [model for model in MODELS if model != "recurrent"])  # a state alone is always loaded
def test_a_load_of_what_another_request_computes_ends_without_reading(model: str, host_bytes: int) -> None:
    rates = FixedRates(None, {Tier.DISK: 1.0})  # it is not known what computing takes: all is loaded
    w = on_disk(model, rates=rates, num_lanes=2, host_bytes=host_bytes)
    w.cache.residency.loader.clock = lambda: 0.0  # no disk is too slow
    disk, memory = w.cache.memory.disk, w.cache.memory
    disk.reader.is_slow = True
    loading = w.begin([*LONG, 90])
    reserved = sum(memory.reserved_bytes.values())
    assert loading.is_loading and reserved > 0

    rates._fixed_token_s = 0.001
    other = w.begin([*LONG, 91])
    for _ in range(4):
        w.prefill_chunk(other)
    loading.advance_loading()
    w.check()
    assert other.cached == 0
    assert sum(memory.reserved_bytes.values()) < reserved or "full" not in model  # of others only the end is needed
    w.prefill(other)
    w.close(other)

    assert not loading.advance_loading()
    w.check()
    assert loading.cached == len(LONG) and disk.counts.loaded_bytes == 0
    w.prefill(loading)
    w.close(loading)
    assert sum(memory.reserved_bytes.values()) == 0


def count_spans(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the lane is asked for rows while the last page of a prompt is recorded."""
    w = World(MODELS["full"], 4, disk=FakeDisk(4), rates=slow_disk(), chunk=4)
    prompt = list(range(4 * num_pages))
    w.run(prompt)
    demote_all(w)
    session = w.begin(prompt)
    for _ in range(num_pages - 1):
        w.prefill_chunk(session)
    calls, spans = [], type(session.lane).spans
    with monkeypatch.context() as patch:
        patch.setattr(type(session.lane), "spans", lambda *args: calls.append(args) or spans(*args))
        w.prefill_chunk(session)
    assert tiers(w)[Tier.DEVICE] == num_pages
    return len(calls)


def test_a_chunk_costs_the_same_however_long_the_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_spans(50, monkeypatch) == count_spans(3, monkeypatch) > 0
