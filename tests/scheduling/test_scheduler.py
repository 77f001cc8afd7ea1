"""Many requests on one engine: who goes next, who waits for whom, and that nobody notices the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bough.cache.prefix_cache import ReuseVersion
from bough.cache.steps import run_at_once
from bough.cache.tree.state import Lane
from bough.errors import BoughError, DoesNotFit, EngineError, TimedOut
from bough.generate.generation import Generation
from bough.scheduling.admission import MAX_PASSED, MIN_SHARED_TOKENS
from bough.tokens import common_prefix
from bough.types import Draw, SampledToken, Usage
from tests.fakes import MODELS
from tests.scheduling.concert import Client, Concert, prompt

every_model = pytest.mark.parametrize("model", MODELS)


@every_model
def test_together_everybody_gets_what_they_would_get_alone(model: str) -> None:
    concert = Concert(model)
    asks = [(prompt(seed, 10 + 7 * seed), {"seed": seed, "temperature": float(seed % 2)}) for seed in range(8)]

    clients = [concert.ask(ids, **params) for ids, params in asks]  # type: ignore[arg-type]
    concert.play()

    assert [client.tokens for client in clients] == [concert.alone(ids, **params) for ids, params in asks]  # type: ignore[arg-type]


def test_words_keep_coming_while_a_long_prompt_is_read() -> None:
    concert = Concert()
    talker = concert.ask(prompt(1, 8), max_tokens=100)
    concert.turn()
    reader = concert.ask(prompt(2, 160))

    for expected in range(2, 10):
        concert.turn()
        assert (len(talker.tokens), reader.tokens) == (expected, [])


def test_a_short_prompt_overtakes_a_long_one_that_is_being_read() -> None:
    concert = Concert()
    long = concert.ask(prompt(1, 600))
    concert.turn()
    short = concert.ask(prompt(2, 20))

    while not short.tokens:
        concert.turn()

    assert not long.tokens
    assert concert.scheduler.running[0].remaining > 500


def test_a_long_prompt_is_passed_over_only_so_often() -> None:
    concert = Concert(lanes=2 * MAX_PASSED)
    long = concert.ask(prompt(0, 48), max_tokens=1)
    concert.turn()
    others = [concert.ask(prompt(seed, 16), max_tokens=1) for seed in range(1, 2 * MAX_PASSED)]

    turns = 0
    while not long.tokens:
        concert.turn()
        turns += 1

    assert turns <= 2 * (MAX_PASSED + 1)
    assert sum(other.is_done for other in others) <= turns - 2


def test_a_request_waits_for_memory_that_others_will_give_back() -> None:
    concert = Concert(budget_bytes=2400)
    first, second = concert.ask(prompt(1, 150)), concert.ask(prompt(2, 150))

    concert.turn()
    assert first.started and not second.started
    concert.play()

    assert second.tokens == concert.alone(prompt(2, 150))


class Counted:
    """Counts the calls of a function, which are made."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.number = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.number += 1
        return self._call(*args, **named)

    def take(self) -> int:
        """How many calls there were since the last time."""
        number, self.number = self.number, 0
        return number


def test_a_request_that_waits_is_matched_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert(budget_bytes=1780)
    first, second, third = concert.ask(prompt(1, 100), max_tokens=20), *(concert.ask(prompt(n, 100)) for n in (2, 3))
    counted, begun = Counted(concert.cache.count_reusable), Counted(concert.cache.begin)
    monkeypatch.setattr(concert.cache, "count_reusable", counted)
    monkeypatch.setattr(concert.cache, "begin", begun)

    while len(first.tokens) < 2:
        concert.turn()
        assert second.started is third.started is None and counted.take() > 0 and begun.take() > 0  # a chunk was published
    while len(first.tokens) < 19:
        concert.turn()
        assert second.started is third.started is None and counted.take() == begun.take() == 0
    concert.play()

    assert begun.take() == 2
    assert [each.tokens for each in (second, third)] == [concert.alone(prompt(n, 100)) for n in (2, 3)]


def test_the_prompts_of_two_requests_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert()
    compared = Counted(common_prefix)
    monkeypatch.setattr("bough.scheduling.admission.common_prefix", compared)
    shared = prompt(1, MIN_SHARED_TOKENS + 80)
    first, second, third = (concert.ask([*shared, token]) for token in (1, 2, 3))

    for _ in range(5):
        concert.turn()

    assert first.started and not second.started and not third.started
    assert compared.number == 2


@every_model
def test_while_its_version_stays_a_cache_reuses_as_many_tokens(model: str) -> None:
    concert, chance = Concert(model, lanes=3, budget_bytes=3000), random.Random(5)
    asks = [([*prompt(seed % 3, 20 * (seed % 5)), *prompt(seed, 5 + seed)], "ab"[seed % 2]) for seed in range(12)]
    before: dict[int, tuple[ReuseVersion, int]] = {}
    kept = changed = 0

    for _ in range(300):
        if chance.random() < 0.2:
            ids, salt = chance.choice(asks)
            concert.ask(ids, salt=salt)
        concert.turn()
        for number, (ids, salt) in enumerate(asks):
            now = concert.cache.reuse_version(salt), concert.cache.count_reusable(ids, salt)
            version, count = before.get(number, now)
            assert now[0] != version or now[1] == count
            kept, changed = kept + (now[0] == version), changed + (now[1] != count)
            before[number] = now

    assert kept > 100 and changed > 10


def test_the_version_of_a_cache_changes_when_another_salt_takes_an_idle_lane() -> None:
    concert = Concert("recurrent", lanes=1)
    cache, client = concert.cache, concert.ask(prompt(1, 40), salt="a")
    concert.play()
    run_at_once(lambda: cache.residency.evictor.clear(cache.forest.find("a")))  # only the lane holds it now
    longer = [*prompt(1, 40), *client.tokens, 1]
    before = cache.reuse_version("a")
    assert cache.count_reusable(longer, "a") == 43

    concert.ask(prompt(2, 10), salt="b")
    concert.play()

    assert cache.count_reusable(longer, "a") == 0
    assert cache.reuse_version("a") != before


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    concert = Concert(budget_bytes=1000)

    client = concert.ask(prompt(1, 500))
    concert.play()

    assert isinstance(client.error, DoesNotFit)
    assert "1,000 bytes" in str(client.error)


def test_a_request_that_takes_too_long_is_told_so_and_its_work_is_kept() -> None:
    concert = Concert()
    client = concert.ask(prompt(1, 400), deadline_s=concert.clock() + 0.5)

    concert.play()

    assert isinstance(client.error, TimedOut)
    assert concert.cache.count_reusable(prompt(1, 400)) > 0


def test_a_client_that_hangs_up_while_it_waits_is_forgotten() -> None:
    concert = Concert(lanes=1)
    first, second = concert.ask(prompt(1, 50)), concert.ask(prompt(2, 50))
    concert.turn()
    second.is_gone = True

    concert.play()

    assert first.completion and not second.started


@every_model
def test_a_failed_step_fails_those_in_it_and_the_next_requests_are_served(model: str) -> None:
    concert = Concert(model)
    clients = [concert.ask(prompt(seed, 10), max_tokens=8) for seed in range(2)]
    while len(clients[1].tokens) < 2:
        concert.turn()
    concert.engine.fail_next = "evaluate"
    concert.play()
    assert all(isinstance(client.error, EngineError) for client in clients)

    again = concert.ask(prompt(0, 10), max_tokens=8)
    concert.play()

    assert again.tokens == concert.alone(prompt(0, 10), max_tokens=8)


def test_a_token_that_cannot_be_chosen_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert()
    sample = concert.engine.sample

    def refuse(logits: list[object], draws: list[Draw]) -> list[SampledToken]:
        if any(draw.params.top_k == 7 for draw in draws):
            raise EngineError("no token can be chosen")
        return sample(logits, draws)

    monkeypatch.setattr(concert.engine, "sample", refuse)
    good, bad = concert.ask(prompt(1, 10)), concert.ask(prompt(2, 10), top_k=7)
    concert.play()

    assert good.tokens == concert.alone(prompt(1, 10))
    assert isinstance(bad.error, EngineError)


@every_model
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_all_are_served_and_nothing_is_lost(model: str, seed: int) -> None:
    chance = random.Random(seed)
    concert = Concert(model, lanes=3, budget_bytes=20_000 if seed % 2 else None)
    bases = [prompt(number, 400) for number in range(4)]
    asked: list[tuple[list[int], Client]] = []
    for _ in range(160):
        roll = chance.random()
        if roll < 0.3:
            base = chance.choice(bases)
            ids = [*base[: chance.randrange(1, len(base))], *prompt(chance.randrange(99), chance.randrange(1, 20))]
            asked.append((ids, concert.ask(ids, max_tokens=chance.randrange(6), salt=chance.choice(["", "x"]))))
        elif roll < 0.35 and asked:
            chance.choice(asked)[1].is_gone = True
        elif roll < 0.38:
            concert.engine.fail_next = chance.choice(["evaluate", "publish", "capture", "reserve", "adopt"])
        concert.turn()
    concert.engine.fail_next = None
    concert.play()

    for ids, client in asked:
        if not client.is_gone:
            assert client.is_done
        if client.completion and client.completion.finish_reason == "length":
            count = client.completion.usage.completion_tokens
            assert client.tokens == concert.alone(ids, max_tokens=count)


def test_nothing_but_our_own_errors_reaches_a_listener() -> None:
    concert = Concert()
    concert.engine.fail_next, concert.engine.fail_with = "reserve", MemoryError
    client = concert.ask(prompt(1, 10))

    concert.play()

    assert isinstance(client.error, BoughError)


def test_a_request_that_a_watchdog_fails_in_the_middle_of_a_step_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert()
    lost, other = concert.ask(prompt(1, 10)), concert.ask(prompt(2, 10))
    while not (lost.tokens and other.tokens):
        concert.turn()
    job, so_far, step = concert.scheduler.running[0], len(lost.tokens), concert.engine.step

    def fail_during(lanes: Sequence[Lane], ids: Sequence[int]) -> list[tuple[float, ...]]:
        job.fail(EngineError("a step takes too long"))
        return step(lanes, ids)

    monkeypatch.setattr(concert.engine, "step", fail_during)
    concert.turn()
    monkeypatch.setattr(concert.engine, "step", step)
    concert.play()

    assert isinstance(lost.error, EngineError) and len(lost.tokens) == so_far
    assert other.tokens == concert.alone(prompt(2, 10))


def test_when_all_have_to_end_one_that_cannot_end_well_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert()
    clients = [concert.ask(prompt(seed, 100)) for seed in range(3)]
    concert.turn()
    first = concert.scheduler.running[0]
    close = first.close

    def close_badly() -> None:
        close()
        raise AssertionError("a mistake of ours")

    monkeypatch.setattr(first, "close", close_badly)

    concert.scheduler.fail_all(EngineError("the end"))

    assert all(isinstance(client.error, EngineError) for client in clients)
    assert not concert.scheduler.has_work


def test_a_request_that_is_cancelled_while_it_waits_for_a_lane_hears_of_its_end_once() -> None:
    concert = Concert(lanes=1)
    concert.ask(prompt(1, 40), max_tokens=20)
    concert.turn()
    waiting = concert.ask(prompt(2, 40))
    concert.turn()

    waiting.is_gone = True
    concert.turn()

    assert waiting.completion is not None and waiting.started is None
    assert waiting.completion.finish_reason == "cancelled"
    assert waiting.completion.usage == Usage(prompt_tokens=40)
    assert waiting.completion.token_ids == () and waiting.completion.text == ""
    concert.play()


def test_an_end_that_cannot_be_put_together_is_told_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    concert = Concert()
    client = concert.ask(prompt(1, 16), max_tokens=1)
    with monkeypatch.context() as broken:
        broken.setattr(Generation, "completion", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            concert.play()
    concert.scheduler.fail_all(EngineError("a mistake of ours"))  # as the worker does

    assert isinstance(client.error, EngineError)
    assert not any(slot.is_busy for slot in concert.cache.lanes.slots)


def test_a_tenant_with_fewer_requests_running_gets_the_next_lane() -> None:
    concert = Concert(lanes=2)
    greedy = [concert.ask([first, 1], tenant="greedy") for first in range(20)]
    concert.turn()
    modest = concert.ask([30, *range(1, 20)], tenant="modest")  # longer than all of the others, and the last to come

    while modest.started is None:
        concert.turn()

    assert sum(client.started is not None for client in greedy) <= 4
    concert.play()
    assert all(client.completion for client in [modest, *greedy])


def test_a_request_whose_lane_took_long_to_adopt_gets_its_first_chunk_in_the_next_turn() -> None:
    concert = Concert()
    talker = concert.ask(prompt(1, 8), max_tokens=100)
    while not talker.tokens:
        concert.turn()
    begin = concert.cache.begin

    def slowly(*args, **options):  # type: ignore[no-untyped-def]
        for _ in range(100):
            concert.clock()
        return begin(*args, **options)

    concert.cache.begin = slowly  # type: ignore[method-assign]
    concert.ask(prompt(2, 40))
    evaluated = concert.engine.evaluated
    before = len(evaluated)
    concert.turn()
    assert evaluated[before:] == [1]  # the talker's token alone
    concert.ask(prompt(3, 40))
    concert.turn()
    assert evaluated[before + 1 :] == [16, 1]  # not twice in a row


def test_a_request_that_scores_its_prompt_waits_for_nobody_reuses_nothing_and_leaves_the_others_as_they_are() -> None:
    concert = Concert()
    prompt = [number % 60 for number in range(400)]
    leader = concert.ask([*prompt, 1])
    scored = concert.ask([*prompt, 2], scores_prompt=True, logprobs=1)
    follower = concert.ask([*prompt, 3])

    for _ in range(3):
        concert.turn()
    assert scored.started is not None and follower.started is None
    concert.play()

    assert scored.scored == [*prompt[1:], 2]
    assert scored.completion is not None and follower.completion is not None
    assert scored.completion.usage.cached_tokens == 0
    assert follower.completion.usage.cached_tokens == len(prompt)
    for client, last in ((leader, 1), (scored, 2), (follower, 3)):
        assert client.tokens == concert.alone([*prompt, last])


def test_nobody_waits_for_a_prefix_that_the_tree_knows_already_while_another_computes_it_again() -> None:
    concert = Concert()
    prompt = [number % 60 for number in range(400)]
    concert.ask([*prompt, 1])
    concert.play()

    scored = concert.ask([*prompt, 2], scores_prompt=True, logprobs=1)
    concert.turn()
    follower = concert.ask([*prompt, 3])
    concert.turn()

    assert scored.started is not None and not scored.is_done
    assert follower.started is not None and follower.started.cached_tokens == len(prompt)
    concert.play()
