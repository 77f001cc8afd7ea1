"""The baselines answer like the tree and keep what they promise, over the fake engine."""

from __future__ import annotations

import pytest

from bough.bench.strategies import CopyPerConversation, LaneSession, SingleEntry
from bough.bench.switch import Oracle
from bough.bench.workload import words
from tests.fakes import MODELS, FakeEngine

every_model = pytest.mark.parametrize("model", MODELS)


def serve(engine: FakeEngine, session: LaneSession, reply: list[int]) -> int:
    while chunk := session.next_chunk(3):
        with session.feeding(chunk):
            engine.evaluate(session.lane, chunk)
    for token in reply:
        with session.feeding([token]):
            engine.step([session.lane], [token])
    session.close()
    return session.cached


@every_model
def test_a_single_entry_serves_only_the_conversation_it_holds(model: str) -> None:
    engine = FakeEngine(MODELS[model])
    single = SingleEntry(engine, engine.make_lane())
    first, second = [1, 2, 3, 4, 5], [9, 8, 7, 6]

    assert serve(engine, single.begin(first, max_new_tokens=1), [6]) == 0
    assert serve(engine, single.begin([*first, 6, 7], max_new_tokens=1), [8]) == 6
    assert serve(engine, single.begin(second), []) == 0
    assert serve(engine, single.begin(first), []) == 0
    assert not engine.live


@every_model
def test_copies_serve_every_conversation_and_hold_each_one_whole(model: str) -> None:
    engine = FakeEngine(MODELS[model])
    copies = CopyPerConversation(engine, engine.make_lane())
    system = [1, 2, 3, 4, 5]
    for chat in (10, 20):
        serve(engine, copies.begin([*system, chat], max_new_tokens=1), [chat + 1])
    before = copies.kept_bytes

    for chat in (10, 20):
        assert serve(engine, copies.begin([*system, chat, chat + 1, 7], max_new_tokens=1), [8]) == 7

    assert copies.kept_bytes >= before
    assert sum(item.nbytes for item in engine.live) == copies.kept_bytes
    copies.clear()
    assert not engine.live


def test_at_most_ten_copies_are_kept() -> None:
    engine = FakeEngine()
    copies = CopyPerConversation(engine, engine.make_lane())
    for chat in range(15):
        serve(engine, copies.begin([chat, 1, 2]), [])
    assert copies.kept_bytes == 10 * 3 * 8
    assert serve(engine, copies.begin([0, 1, 2]), []) == 0
    assert serve(engine, copies.begin([14, 1, 2]), []) == 2


def test_the_oracle_knows_what_an_unlimited_tree_could_reuse() -> None:
    oracle = Oracle()
    assert oracle.possible([1, 2, 3]) == 0
    oracle.add([1, 2, 3, 4])
    assert oracle.possible([1, 2, 3]) == 2
    assert oracle.possible([1, 2, 9, 9]) == 2
    oracle.add([1, 2, 9])
    assert oracle.possible([1, 2, 9, 5]) == 3


def test_words_are_the_same_for_the_same_seed() -> None:
    assert words(40, 1) == words(40, 1) != words(40, 2)
    assert len(words(40, 1).split()) == 40
