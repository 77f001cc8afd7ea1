"""The end of a session: the path is not looked up again, and a chain of nodes becomes one."""

from __future__ import annotations

from typing import Any

import pytest

from bough.cache import record
from bough.cache.tree.state import Tier
from bough.cache.tree.trie import MAX_UNBRANCHED, Trie
from tests.fake_disk import FakeDisk
from tests.fake_store import FakeObjects, StepStore
from tests.fakes import MODELS
from tests.scenarios.test_tiers import demote_all, tiers
from tests.scenarios.world import World

PAGE = 4


def watch_matches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets, for each match from now on, whether it is one of all tokens instead of those after a hold."""
    calls, match = list[bool](), Trie.match

    def noting_match(trie: Trie[Any], tokens: Any, start: Any = None) -> Any:
        calls.append(start is None)
        return match(trie, tokens, start)

    monkeypatch.setattr(Trie, "match", noting_match)
    return calls


@pytest.mark.parametrize("num_pages", [1, 50])
def test_promoting_does_not_look_the_path_up(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(MODELS["full"], PAGE, budget_bytes=100_000, host_bytes=100_000)
    prompt = list(range(PAGE * num_pages))
    w.run(prompt)
    demote_all(w)
    session = w.begin([*prompt, 999])
    w.prefill(session)
    assert tiers(w)[Tier.HOST] == num_pages
    calls = watch_matches(monkeypatch)

    session.close()

    w.check()
    assert tiers(w)[Tier.HOST] == 0
    assert calls == [False]  # of what was recorded last


@pytest.mark.parametrize("model", MODELS)
def test_a_request_matches_its_prompt_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, prompt = FakeObjects(), list(range(30))
    for owner, end in [("first", 20), ("first", 30), ("second", 30)]:
        disk, shared = FakeDisk(PAGE), StepStore(objects, PAGE, owner)
        w = World(MODELS[model], PAGE, budget_bytes=100_000, host_bytes=100_000, disk=disk, shared=shared)
        for _ in range(2):  # what is computed or fetched first is on disk the second time
            with monkeypatch.context() as patch:
                calls = watch_matches(patch)
                w.run(prompt[:end], [7, 8])
            assert sum(calls) == 1
            disk.work()
            shared.work()
            demote_all(w)


def chain(w: World, num_edges: int) -> list[int]:
    """The tokens of a path that parted at each page, until eviction has taken the other branch of each."""
    tokens = list(range(PAGE * num_edges))
    w.run(tokens)
    trie = w.cache.forest.tries[""]
    for at in range(PAGE, PAGE * num_edges, PAGE):
        w.run([*tokens[:at], 999])
    for node in [node for node in trie.walk() if node.is_leaf and node.end < len(tokens)]:
        w.cache.residency.evictor.remove(trie, node)
    w.check()
    return tokens


def edges(w: World, tokens: list[int]) -> int:
    return len(w.cache.forest.tries[""].match(tokens).path)


@pytest.mark.parametrize("model", MODELS)
def test_edges_that_eviction_leaves_unbranched_are_merged_by_the_session_that_uses_them(model: str) -> None:
    w = World(MODELS[model], PAGE)
    tokens = chain(w, 10)
    assert edges(w, tokens) == 10

    w.run(tokens[:-1])

    assert edges(w, tokens) < 3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_edges", "left"), [(MAX_UNBRANCHED, MAX_UNBRANCHED), (MAX_UNBRANCHED + 2, 1)])
def test_a_match_across_too_many_unbranched_edges_has_the_next_session_merge_them(
    model: str, num_edges: int, left: int
) -> None:
    w = World(MODELS[model], PAGE)
    tokens = chain(w, num_edges)
    cached = w.cache.count_reusable(tokens)  # nothing closes on this path

    w.run([5, 5])

    assert edges(w, tokens) == left
    assert w.cache.count_reusable(tokens) == cached


@pytest.mark.parametrize("model", MODELS)
def test_a_long_edge_does_not_grow_chunk_by_chunk_and_is_one_node_at_the_end(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LONG_EDGE_TOKENS", 2 * PAGE)
    w = World(MODELS[model], PAGE, disk=FakeDisk(PAGE), chunk=PAGE)
    prompt = list(range(50))
    session = w.begin(prompt)
    w.prefill(session)
    path = session.sequence.hold.node.path()
    assert [node.start for node in path] == [0, 8, 16, 24, 32, 40, 48]

    w.close(session)

    (node,) = w.cache.forest.tries[""].match(prompt).path
    assert (node.start, node.end) == (0, 50)


def test_the_first_chunk_of_a_turn_grows_a_long_edge_to_the_page_border(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LONG_EDGE_TOKENS", 2 * PAGE)
    w = World(MODELS["full"], PAGE, disk=FakeDisk(PAGE), chunk=PAGE)
    w.run(range(10))

    session = w.begin(range(20))
    w.prefill(session)

    assert [(node.start, node.end) for node in session.sequence.hold.node.path()] == [(0, 12), (12, 20)]
