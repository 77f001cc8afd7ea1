"""The end of a session: promotion looks at the path once, and a chain of nodes becomes one again."""

from __future__ import annotations

import pytest

from bough.cache import record
from bough.cache.tree.state import Tier
from bough.cache.tree.trie import Trie
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.test_tiers import demote_all, tiers
from tests.scenarios.world import World

PAGE = 4


def count_matches(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the path is looked up at the end of a session that brings so many pages back from the host."""
    w = World(MODELS["full"], PAGE, budget_bytes=100_000, host_bytes=100_000)
    prompt = list(range(PAGE * num_pages))
    w.run(prompt)
    demote_all(w)
    session = w.begin([*prompt, 999])
    w.prefill(session)
    assert tiers(w)[Tier.HOST] == num_pages
    calls, match = [], Trie.match
    with monkeypatch.context() as patch:
        patch.setattr(Trie, "match", lambda *args, **kwargs: calls.append(args) or match(*args, **kwargs))
        session.close()
    w.check()
    assert tiers(w)[Tier.HOST] == 0
    return len(calls)


def test_promoting_many_pages_looks_the_path_up_no_more_often_than_promoting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_matches(50, monkeypatch) == count_matches(1, monkeypatch)


@pytest.mark.parametrize("model", MODELS)
def test_a_long_edge_does_not_grow_chunk_by_chunk_and_is_one_node_at_the_end(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LONG_EDGE_TOKENS", 2 * PAGE)
    w = World(MODELS[model], PAGE, disk=FakeDisk(PAGE), chunk=PAGE)
    prompt = list(range(50))
    session = w.begin(prompt)
    w.prefill(session)
    path = session.sequence.pin.node.path()
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

    assert [(node.start, node.end) for node in session.sequence.pin.node.path()] == [(0, 12), (12, 20)]
