"""Many prompts at once, and several answers to one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bough import Completion, PromptTooLong, RequestError, Runner
from bough.runner.delivery import WINDOW
from tests.runner.long_answers import ENDLESS, PROMPT, count_cached, hold_until_queued

SHORT: Any = {"max_tokens": 2, "ignore_eos": True}
SHARED = [3 + each % 90 for each in range(600)]


def test_500_prompts_on_two_lanes_are_answered_in_their_order(runner: Runner) -> None:
    prompts = [[3 + number % 90, 3 + number // 90, 7] for number in range(500)]
    assert len(prompts) > WINDOW
    done: dict[int, Completion] = {}
    answers = runner.batch(prompts, **SHORT, keep_state=False, on_done=done.__setitem__)
    assert [done[number] for number in range(500)] == answers
    assert {answer.finish_reason for answer in answers} == {"length"}
    for number in (0, 255, 256, 499):
        assert runner.generate(prompts[number], **SHORT).token_ids == answers[number].token_ids


def test_what_prompts_share_is_computed_once(runner: Runner) -> None:
    held = hold_until_queued(runner, 5)
    answers = runner.batch([[*SHARED, 91 + number] for number in range(5)], **SHORT)
    held.result()
    assert sum(answer.usage.computed_tokens for answer in answers) == len(SHARED) + 5


def test_several_answers_to_one_prompt_share_it_and_have_their_own_numbers(runner: Runner) -> None:
    options: Any = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    told: list[tuple[int, int]] = []
    held = hold_until_queued(runner, 4)
    answers = runner.generate(SHARED, n=4, **options, on_progress=lambda done, total: told.append((done, total)))
    held.result()
    alone = [runner.generate(SHARED, choice=number, **options) for number in range(4)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert sum(answer.usage.computed_tokens for answer in answers) == len(SHARED) + 3
    assert told[-1] == (len(SHARED), len(SHARED))
    others = asyncio.run(runner.agenerate(SHARED, n=2, choice=2, **options))
    assert [answer.token_ids for answer in others] == [answer.token_ids for answer in alone[2:]]


def test_n_must_be_at_least_one(runner: Runner) -> None:
    assert len(runner.generate(PROMPT, n=1, **SHORT)) == 1
    with pytest.raises(RequestError, match="n is 0, and must be a whole number of at least 1"):
        runner.generate(PROMPT, n=0)
    with pytest.raises(RequestError, match="n is -1, and must be a whole number of at least 1"):
        asyncio.run(runner.agenerate(PROMPT, n=-1))


def test_nothing_to_ask_gives_nothing(runner: Runner) -> None:
    assert runner.batch([]) == []
    assert asyncio.run(runner.abatch([])) == []


def test_a_batch_of_a_task_equals_that_of_a_thread(runner: Runner) -> None:
    prompts, done = [[3 + number, 5, 7] for number in range(20)], []
    answers = asyncio.run(runner.abatch(prompts, **SHORT, on_done=lambda number, answer: done.append(number)))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in runner.batch(prompts, **SHORT)]
    assert sorted(done) == list(range(20))


def test_one_that_fails_ends_the_others_and_is_raised(runner: Runner) -> None:
    too_long = [5] * (runner.context_tokens + 1)
    with pytest.raises(PromptTooLong) as told:
        runner.batch([PROMPT, too_long, PROMPT], **ENDLESS)
    assert told.value.__notes__ == ["That is number 1 of 3, counted from 0."]
    assert runner.cache.stats()["busy_lanes"] == 0
    with pytest.raises(PromptTooLong) as told:
        asyncio.run(runner.abatch([PROMPT, too_long, PROMPT], **ENDLESS))
    assert told.value.__notes__ == ["That is number 1 of 3, counted from 0."]


def test_a_cancelled_batch_returns_what_there_is(runner: Runner) -> None:
    answers = iter([False] * 20)
    ended = runner.batch([PROMPT] * 5, **ENDLESS, is_cancelled=lambda: next(answers, True))
    assert {answer.finish_reason for answer in ended} == {"cancelled"}
    assert len(ended) == 5
    assert count_cached(runner) == len(PROMPT) - 1


@pytest.mark.parametrize("prompts", ["Hello", 5])
def test_prompts_that_are_no_list_are_refused(runner: Runner, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts is a"):
        runner.batch(prompts, **SHORT)
    with pytest.raises(RequestError, match="prompts is a"):
        asyncio.run(runner.abatch(prompts, **SHORT))


def test_a_choice_that_is_no_number_is_refused(runner: Runner) -> None:
    with pytest.raises(RequestError, match="choice is 'first'"):
        runner.generate(PROMPT, choice="first", **SHORT)  # type: ignore[call-overload]
