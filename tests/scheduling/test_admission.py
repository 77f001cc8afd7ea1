"""Which request gets a lane, and which waits for a prefix that another computes, on a fake engine turn by turn."""

from __future__ import annotations

import pytest

from bough.scheduling.admission import MAX_CANDIDATES, MAX_PASSED, MIN_SHARED_TOKENS
from tests.fakes import MODELS
from tests.scheduling.concert import Concert, prompt

every_model = pytest.mark.parametrize("model", MODELS)


def test_a_request_that_waits_for_a_lane_is_passed_over_only_so_often() -> None:
    concert = Concert(lanes=1)
    concert.ask(prompt(0, 16), max_tokens=1)
    long = concert.ask(prompt(1, 200), max_tokens=1)
    shorts = [concert.ask(prompt(seed, 16), max_tokens=1) for seed in range(2, 30)]

    while not long.is_done:
        concert.turn()

    assert MAX_PASSED - 1 <= sum(short.is_done for short in shorts) <= MAX_PASSED + 1


@every_model
def test_a_prefix_that_two_need_is_computed_once(model: str) -> None:
    concert = Concert(model)
    shared = prompt(1, MIN_SHARED_TOKENS + 80)

    clients = [concert.ask([*shared, *prompt(seed, 10)]) for seed in range(2, 5)]
    concert.play()

    assert concert.engine.evaluated.count(16) < 2 * len(shared) // 16
    cached = sorted(client.completion.usage.cached_tokens for client in clients if client.completion)
    assert cached[0] == 0 and cached[1] >= len(shared) - 16


@every_model
@pytest.mark.parametrize("ending", ["gone", "failed", "late"])
def test_when_the_one_that_computes_it_ends_early_the_oldest_of_the_others_goes_on(model: str, ending: str) -> None:
    concert = Concert(model)
    shared = prompt(1, MIN_SHARED_TOKENS + 200)
    leader = concert.ask([*shared, 1], deadline_s=concert.clock() + 0.6 if ending == "late" else float("inf"))
    first, second = (concert.ask([*shared, token]) for token in (2, 3))
    for _ in range(5):
        concert.turn()
    assert first.started is second.started is None or ending == "late"

    leader.is_gone = ending == "gone"
    concert.engine.fail_next = "evaluate" if ending == "failed" else None
    concert.play()

    assert leader.error is not None or leader.completion is not None
    assert first.tokens == concert.alone([*shared, 2]) and second.tokens == concert.alone([*shared, 3])
    assert sum(concert.engine.evaluated) < 2 * len(shared)


def test_nobody_waits_for_a_prefix_of_another_salt() -> None:
    concert = Concert()
    shared = prompt(1, MIN_SHARED_TOKENS + 80)

    clients = [concert.ask(shared, salt=salt) for salt in ("a", "b")]
    concert.turn()

    assert all(client.started for client in clients)
    concert.play()
    assert all(client.completion and client.completion.usage.cached_tokens == 0 for client in clients)


@every_model
def test_a_request_that_comes_late_waits_for_the_little_that_is_left(model: str) -> None:
    concert = Concert(model)
    shared = prompt(1, MIN_SHARED_TOKENS + 48)
    leader = concert.ask([*shared, *prompt(2, 10)])
    while concert.scheduler.waiting or concert.scheduler.running[0].remaining > 42:
        concert.turn()

    late = concert.ask([*shared, *prompt(3, 10)])
    concert.turn()
    assert late.started is None
    concert.play()

    assert leader.completion and late.completion
    assert late.completion.usage.cached_tokens >= len(shared) - 16


def test_a_request_that_knows_more_than_a_leader_has_computed_does_not_wait() -> None:
    concert = Concert()
    shared = prompt(1, MIN_SHARED_TOKENS + 48)
    concert.ask([*shared, 1], scores_prompt=True, logprobs=0)  # it computes all of it, whatever is known
    concert.turn()
    concert.cache.count_reusable = lambda packed, salt: len(shared) - 8  # type: ignore[method-assign]

    other = concert.ask([*shared, 2])
    concert.turn()

    assert other.started is not None


def test_so_many_of_those_that_wait_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert(lanes=1)
    counted: list[bytes] = []
    count = concert.cache.count_reusable

    def note(packed: bytes, salt: str) -> int:
        counted.append(packed)
        return count(packed, salt)

    monkeypatch.setattr(concert.cache, "count_reusable", note)
    for seed in range(MAX_CANDIDATES + 20):
        concert.ask(prompt(seed, 8), max_tokens=1)

    concert.turn()

    assert len(set(counted)) == MAX_CANDIDATES
    concert.play()
