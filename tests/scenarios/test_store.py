"""Two machines and one store: what the first has computed, the second finds, whatever kinds of state the model has."""

from __future__ import annotations

from typing import Any

import pytest

from bough.cache.store import StoreError
from bough.cache.tree.state import Kind, Tier
from tests.fake_disk import FakeDisk
from tests.fake_store import FakeObjects, StepStore, failing
from tests.fakes import MODELS, FixedRates
from tests.scenarios.models import every_fake, world
from tests.scenarios.world import World, clear_idle_lanes

PROMPT = list(range(1, 12))
REPLY = [20, 21, 22]
PAGE = 2
FAKES = [*MODELS, "pooled:full", "pooled:full+window", "pooled:full+recurrent", "pooled:window+recurrent+full"]


def machine(model: str, objects: FakeObjects, owner: str = "first", **options: Any) -> World:
    settings = {
        name: options.pop(name) for name in ("secret", "fingerprint", "wall", "max_object_bytes") if name in options
    }
    return world(model, PAGE, shared=StepStore(objects, PAGE, owner=owner, **settings), **options)


def store_of(w: World) -> StepStore:
    store = w.cache.memory.shared
    assert isinstance(store, StepStore)
    return store


def fill(model: str, objects: FakeObjects, **options: Any) -> World:
    """A machine that has answered one prompt, and sent it."""
    first = machine(model, objects, **options)
    first.run(PROMPT, REPLY)
    store_of(first).work()
    return first


@pytest.mark.parametrize("model", [*FAKES, "torch:llama", "torch:gemma3_text", "torch:qwen3_next", "pool:qwen3_next"])
def test_a_machine_with_an_empty_tree_serves_a_prompt_from_the_store(model: str) -> None:
    objects = FakeObjects()
    fill(model, objects)
    second = machine(model, objects, "second")

    done = second.run([*PROMPT, *REPLY[:2], 30, 31, 32])

    assert done.cached >= len(PROMPT) - 1
    assert store_of(second).counts.loaded_bytes > 0


@every_fake
def test_what_was_fetched_is_saved_and_served_from_disk_afterwards(model: str) -> None:
    objects, disk = FakeObjects(), FakeDisk(PAGE)
    fill(model, objects)
    second = machine(model, objects, "second", disk=disk)
    second.run([*PROMPT, *REPLY])
    disk.work()

    objects.fault = failing("get")
    third = machine(model, objects, "third", disk=disk.restarted())
    assert third.run([*PROMPT, *REPLY, 40]).cached >= len(PROMPT) - 1


@every_fake
def test_a_prompt_that_leaves_a_known_one_inside_a_page_takes_what_it_shares(model: str) -> None:
    objects = FakeObjects()
    first = machine(model, objects)
    first.run([*PROMPT, 50, 51])
    first.run([*PROMPT, 60, 61])  # parts from it inside a page, which two nodes have then
    store_of(first).work()
    second = machine(model, objects, "second")
    second.run(PROMPT[:5])
    done = second.run([*PROMPT, 60, 61, 62])
    assert done.cached >= len(PROMPT) - 1


def test_a_salt_finds_nothing_of_another() -> None:
    objects = FakeObjects()
    first = machine("full", objects)
    first.run(PROMPT, REPLY, salt="one")
    store_of(first).work()
    second = machine("full", objects, "second")
    assert second.run(PROMPT, salt="two").cached == 0
    assert second.run(PROMPT, salt="one").cached == len(PROMPT) - 1


def test_a_request_that_is_not_stored_sends_nothing() -> None:
    objects = FakeObjects()
    first = machine("full", objects)
    with first.cache.begin(PROMPT, keep_state=False) as session:
        first.load(session)
        first.prefill(session)
    store_of(first).work()
    assert not objects.pages


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"fingerprint": "beef" * 16}])
def test_another_secret_or_model_finds_nothing(other: dict[str, Any]) -> None:
    objects = FakeObjects()
    fill("full+recurrent", objects)
    second = machine("full+recurrent", objects, "second", **other)
    assert second.run([*PROMPT, *REPLY]).cached == 0


def truncate(key: str, content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(key: str, content: bytes) -> bytes:
    at = len(content) - 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@every_fake
@pytest.mark.parametrize("corrupt", [truncate, flip])
def test_a_damaged_object_is_computed_and_sent_again(model: str, corrupt: Any) -> None:
    objects = FakeObjects()
    fill(model, objects)
    objects.corrupt = corrupt
    second = machine(model, objects, "second")
    assert second.run([*PROMPT, *REPLY]).cached == 0
    assert sum(store_of(second).counts.misses.values()) > 0
    store_of(second).work()
    assert store_of(second).counts.refreshed > 0

    objects.corrupt = lambda key, content: content
    third = machine(model, objects, "third")
    assert third.run([*PROMPT, *REPLY]).cached >= len(PROMPT) - 1


def test_an_object_that_is_much_too_large_is_not_read_and_sent_again() -> None:
    objects = FakeObjects()
    fill("full", objects)
    for key in objects.pages:
        objects.put(key, bytes(5000))
    second = machine("full", objects, "second", max_object_bytes=4096)

    assert second.run([*PROMPT, *REPLY]).cached == 0
    store_of(second).work()

    assert "it has 5,000 bytes, and at most 4,096 are read" in store_of(second).warnings[0]
    assert store_of(second).counts.refreshed > 0


@every_fake
def test_swapped_objects_are_misses(model: str) -> None:
    objects = FakeObjects()
    fill(model, objects)
    kept = {key: each for key, each in objects.objects.items() if key in objects.pages}
    objects.objects |= dict(zip(kept, [*list(kept.values())[1:], next(iter(kept.values()))], strict=True))
    second = machine(model, objects, "second")
    assert second.run([*PROMPT, *REPLY]).cached == 0
    assert store_of(second).counts.misses["foreign"] > 0


def test_a_store_that_fails_is_left_alone_and_no_request_waits_for_it() -> None:
    objects = FakeObjects()
    fill("full", objects)
    objects.fault = failing("get", "head", "put_new", "list")
    second = machine("full", objects, "second")
    assert second.run([*PROMPT, *REPLY]).cached == 0
    store, before = store_of(second), objects.calls.copy()
    assert store.counts.errors == 1 and "made to fail" in store.problem and len(store.warnings) == 1

    session = second.begin([*PROMPT[:6], 70, 71, 72])
    assert not session.is_loading and objects.calls == before
    second.close(session)

    objects.fault = lambda call, key: None
    store.now += 100
    second.cache.upkeep.clear()
    assert not objects.pages  # and of what was cleared nothing is left
    assert second.run([*PROMPT, *REPLY]).cached == 0
    assert not store.problem


def test_a_store_that_is_slow_is_not_waited_for_longer_than_computing_is_worth() -> None:
    objects = FakeObjects()
    fill("full", objects)
    second = machine("full", objects, "second", rates=FixedRates(token_s=0.1), num_lanes=2)
    now = [0.0]
    second.cache.residency.loader.clock = lambda: now[0]
    store_of(second).reader.is_slow = True
    slow = second.begin([*PROMPT, *REPLY])
    assert slow.is_loading

    assert second.run([80]).computed == 1  # others go on, unless they wait for the store as well
    now[0] = 0.13  # a tenth of the 1.4 s that computing takes
    assert slow.advance_loading()
    now[0] = 0.15
    assert not slow.advance_loading() and slow.cached == 0
    second.prefill(slow)
    second.close(slow)


def test_a_store_that_hangs_is_not_waited_for_when_it_is_not_known_what_computing_takes() -> None:
    objects = FakeObjects()
    fill("full", objects)
    second = machine("full", objects, "second")
    now = [0.0]
    second.cache.residency.loader.clock = lambda: now[0]
    store_of(second).reader.is_slow = True
    session = second.begin([*PROMPT, *REPLY])
    now[0] = 1.9
    assert session.advance_loading()
    now[0] = 2.1
    assert not session.advance_loading() and session.cached == 0
    second.close(session)
    assert not second.cache.residency.loader.rates.byte_s(Tier.STORE)  # connecting takes long: that tells nothing


def test_requests_that_want_the_same_pages_share_one_read() -> None:
    objects = FakeObjects()
    fill("full", objects)
    second = machine("full", objects, "second", num_lanes=2)
    store_of(second).reader.is_slow = True
    sessions = [second.begin([*PROMPT, *REPLY]) for _ in range(2)]
    store_of(second).reader.is_slow = False
    before = objects.calls["get"]
    for session in sessions:
        second.load(session)
        assert session.cached == 12
    assert objects.calls["get"] - before == 7  # of which the last finds nothing
    for session in sessions:
        second.close(session)


def test_what_is_slower_to_fetch_than_to_compute_is_computed() -> None:
    objects = FakeObjects()
    fill("full", objects)
    slow = machine("full", objects, "second", rates=FixedRates(0.001, {Tier.STORE: 1.0}))
    before = objects.calls["get"]
    assert slow.run([*PROMPT, *REPLY]).cached == 0 and objects.calls["get"] == before
    quick = machine("full", objects, "third", rates=FixedRates(0.001, {Tier.STORE: 1e-6}))
    assert quick.run([*PROMPT, *REPLY]).cached == 12


def test_what_is_not_there_is_not_asked_for_again_at_once() -> None:
    objects = FakeObjects()
    w = machine("full", objects)
    with w.begin(PROMPT):
        pass  # cancelled: nothing is computed
    before = objects.calls["get"]
    w.run(PROMPT)
    assert objects.calls["get"] == before
    assert store_of(w).counts.not_found == 1


@every_fake
def test_clearing_a_salt_deletes_it_in_the_store_and_others_do_not_send_it_again(model: str) -> None:
    objects = FakeObjects()
    first = fill(model, objects)
    first.run([90, 91, 92, 93], salt="kept")
    store_of(first).work()
    second = machine(model, objects, "second")
    second.run([*PROMPT, *REPLY])

    first.cache.upkeep.clear("")
    root = store_of(first).keys.root("").hex()
    assert objects.pages and not any(root in key for key in objects.pages)

    second.run([*PROMPT, *REPLY, 40, 41])
    store_of(second).work()
    assert not any(root in key for key in objects.pages) and store_of(second).counts.refused > 0
    first.run(PROMPT)  # what is computed after the clear may be sent
    store_of(first).work()
    assert any(root in key for key in objects.pages)


def test_clearing_says_when_the_store_may_have_kept_something() -> None:
    objects = FakeObjects()
    first = fill("full", objects)
    objects.fault = failing("list")
    with pytest.raises(StoreError, match="may still have what was to be cleared: list was made to fail"):
        first.cache.upkeep.clear()


def test_what_the_store_has_counts_in_the_figures() -> None:
    objects = FakeObjects()
    fill("full", objects)
    second = machine("full", objects, "second")
    session = second.begin([*PROMPT, *REPLY])
    assert session.loading.store_bytes == second.stats()["store_loaded_bytes"] > 0
    second.close(session)
    assert MODELS["full"][0].bytes_per_token * 12 < session.loading.store_bytes


@pytest.mark.parametrize("model", ["full", "pooled:full", "full+window"])
def test_rows_that_were_lost_where_two_prompts_part_come_back_to_the_part_that_they_share(model: str) -> None:
    objects = FakeObjects()
    other = [*PROMPT[:5], 60, 61, 62]  # parts from it inside a page
    first = machine(model, objects)
    first.run(other, REPLY)
    store_of(first).work()
    second = machine(model, objects, "second", num_lanes=2)
    second.run(PROMPT)
    trie = second.cache.forest.find("")
    node = trie.match(PROMPT).node
    for group in [group for group in second.engine.groups if group.kind is Kind.FULL]:
        trie.drop_page(node, next(page for page in node.pages[group] if page.start == 4))  # as a load that failed does

    second.run(other)
    clear_idle_lanes(second.cache)

    assert second.run([*other[:6], 70]).cached == (6 if second.is_full_only else 0)
    assert not second.cache.forest.find("").match(other).node.parent.has_holes


def test_restore_points_that_lie_on_disk_alone_are_not_looked_for_in_the_store_again_and_again() -> None:
    objects, disk = FakeObjects(), FakeDisk(PAGE)
    first = machine("full+recurrent", objects, disk=disk, point_spacing=2)
    chat = [*PROMPT, *REPLY]
    first.run(chat)
    disk.work()
    while first.cache.residency.evictor.evict_one():
        pass
    clear_idle_lanes(first.cache)
    for turn in range(4):
        store_of(first).work()
        before = objects.calls.copy()
        chat = [*chat, 40 + turn, 50 + turn]
        first.run(chat)
    store_of(first).work()
    assert objects.calls["get"] - before["get"] <= 2  # the list of the page that is new, and what comes after it
