"""Checks of the cache: a share of the hits is computed again when nothing else runs, and compared."""

from __future__ import annotations

import pytest

from bough.errors import EngineError
from bough.types import Completion, Draw, SampledToken
from tests.scheduling.concert import Concert
from tests.scheduling.test_scheduler import every_model, prompt


class Dice:
    """Says yes to every check."""

    def __call__(self) -> float:
        return 0.0


@every_model
def test_hits_are_checked_when_all_is_quiet_and_found_right(model: str) -> None:
    concert = Concert(model, random=Dice())
    for _ in range(3):
        concert.ask(prompt(1, 100))
        concert.play()

    assert concert.verifier is not None
    assert concert.verifier.stats() == {"verified": 2, "different": 0}


def test_a_hit_that_is_wrong_raises_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    concert = Concert(random=Dice())
    concert.ask(prompt(1, 100))
    concert.play()
    for slot in concert.cache.lanes.slots:
        slot.clear()
    (trie,) = concert.cache.forest.tries.values()
    page = next(page for node in trie.walk() for pages in node.pages.values() for page in pages)
    page.rows = tuple(reversed(page.rows))

    concert.ask(prompt(1, 100))
    while concert.scheduler.has_work:
        concert.scheduler.turn()

    assert concert.verifier is not None
    assert concert.verifier.stats() == {"verified": 1, "different": 1}
    assert "ALARM" in caplog.text


def make_pending_check(concert: Concert) -> None:
    """Let a prompt be reused, so that a check of it begins, and is in the middle of its prompt."""
    for _ in range(2):
        client = concert.ask(prompt(1, 100))
        while not client.is_done:
            concert.turn()
    while not any(job.is_prefilling for job in concert.scheduler.running):
        concert.turn()


@every_model
def test_a_check_gives_its_lane_to_whoever_comes_and_is_made_when_all_is_quiet_again(model: str) -> None:
    concert = Concert(model, lanes=1, random=Dice())
    make_pending_check(concert)

    client = concert.ask(prompt(2, 10))
    concert.turn()

    assert client.started
    assert concert.verifier is not None and concert.verifier.num_checked == 0
    concert.play()
    assert concert.verifier.stats() == {"verified": 1, "different": 0}


@pytest.mark.parametrize("error", [EngineError, MemoryError])
@pytest.mark.parametrize("moment", ["noting", "comparing"])
def test_a_check_that_fails_costs_nobody_an_answer(
    moment: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    concert = Concert(random=Dice())
    concert.ask(prompt(1, 100))
    concert.play()
    sample, looks = concert.engine.sample, 0

    def look(logits: list[object], draws: list[Draw]) -> list[SampledToken]:
        nonlocal looks
        looks += draws[0].params.logprobs is not None
        if draws[0].params.logprobs is not None and looks == (1 if moment == "noting" else 2):
            raise error("no memory for a look")
        return sample(logits, draws)

    monkeypatch.setattr(concert.engine, "sample", look)
    client = concert.ask(prompt(1, 100))
    concert.play()

    assert client.tokens == concert.alone(prompt(1, 100))
    assert concert.verifier is not None and concert.verifier.stats() == {"verified": 0, "different": 0}


def test_a_check_that_is_postponed_is_told_so_once() -> None:
    concert = Concert(random=Dice())
    make_pending_check(concert)
    (check,) = concert.scheduler.running
    heard: list[Completion] = []
    check.listener = heard.append  # type: ignore[assignment]

    concert.ask(prompt(2, 16))
    concert.turn()

    assert [each.finish_reason for each in heard] == ["cancelled"]
