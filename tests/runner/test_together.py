"""Requests of many threads on few lanes: all are answered, each as if it were alone, and one that fails fails alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import bough
from bough import Completion, DoesNotFit, EngineError, Runner
from tests.runner.conftest import check_idle
from tests.runner.long_answers import ENDLESS, PROMPT, count_cached, hold_until_queued, watch_steps
from tests.tiny_models import make_folder
from tests.waiting import BOUND_S

CLOSE = 1e-4  # two best log-probabilities nearer than this may change places by rounding


def run_in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time, each in a thread of its own; returns their results in order."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait(BOUND_S)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def make_prompts(number: int) -> list[list[int]]:
    chance = random.Random(number)
    shared = [chance.randrange(3, 97) for _ in range(40)]
    return [shared[: 10 + 5 * each] + [chance.randrange(3, 97) for _ in range(5 + each)] for each in range(number)]


def check_same(together: Completion, alone: Completion) -> None:
    """Equal tokens, up to the first place at which the two likeliest are equally likely but for rounding."""
    for ours, theirs, choice in zip(together.token_ids, alone.token_ids, alone.logprobs, strict=True):
        first, second = choice.top[:2]
        if ours != theirs and first.logprob - second.logprob < CLOSE:
            return
        assert ours == theirs


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_answers_together_equal_those_alone(name: str, tmp_path: Path) -> None:
    prompts = make_prompts(6)
    greedy: Any = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    seeded: Any = {**greedy, "temperature": 1.0, "seed": 7}
    with bough.load(make_folder(name, tmp_path / name), engine="torch", lanes=3) as runner:

        def ask(prompt: list[int], options: Any, salt: str) -> Completion:
            return runner.generate(prompt, salt=salt, **options)

        alone = [ask(prompt, options, "alone") for options in (greedy, seeded) for prompt in prompts]
        together = run_in_threads(
            [lambda p=prompt, o=options: ask(p, o, "together") for options in (greedy, seeded) for prompt in prompts]
        )
        check_idle(runner)
    for ours, theirs in zip(together, alone, strict=True):
        check_same(ours, theirs)


def test_a_hundred_threads_on_two_lanes_are_all_answered(runner: Runner) -> None:
    prompts = [[3 + each, 5, 7, 3 + each] for each in range(100)]
    answers = run_in_threads([lambda p=prompt: runner.generate(p, max_tokens=2, ignore_eos=True) for prompt in prompts])
    assert [len(answer.token_ids) for answer in answers] == [2] * 100
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_streams_of_several_threads_give_whole_answers(runner: Runner) -> None:
    def read(prompt: list[int]) -> tuple[str, str]:
        *pieces, completion = runner.stream(prompt, max_tokens=12, ignore_eos=True)
        assert isinstance(completion, Completion)
        return "".join(piece.text for piece in pieces), completion.text

    for streamed, whole in run_in_threads([lambda p=prompt: read(p) for prompt in make_prompts(8)]):
        assert streamed == whole


def test_threads_and_event_loops_share_the_lanes(runner: Runner) -> None:
    async def ask_many(prompts: list[list[int]]) -> list[Completion]:
        return list(await asyncio.gather(*(runner.agenerate(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts)))

    prompts = make_prompts(6)
    works: list[Callable[[], Any]] = [lambda: asyncio.run(ask_many(prompts))] * 2
    works += [lambda: [runner.generate(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]] * 2
    first, *others = run_in_threads(works)
    assert [answer.token_ids for answer in first] != []
    for answers in others:
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in first]


def test_an_error_of_the_engine_in_one_prompt_fails_that_request_alone(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, evaluate = runner.runtime.engine, runner.runtime.engine.evaluate

    def fail_for_one(lane: Any, ids: Any) -> Any:
        if 96 in list(ids):
            raise EngineError("this token hurts")
        return evaluate(lane, ids)

    monkeypatch.setattr(engine, "evaluate", fail_for_one)
    prompts = [[3, 4, 5], [6, 96, 7], [8, 9, 10], [11, 12, 13]]

    def ask(prompt: list[int]) -> str:
        try:
            return runner.generate(prompt, max_tokens=4, ignore_eos=True).finish_reason
        except EngineError as error:
            return str(error)

    assert run_in_threads([lambda p=prompt: ask(p) for prompt in prompts]) == [
        "length",
        "this token hurts",
        "length",
        "length",
    ]


def test_a_request_that_never_fits_fails_alone_with_the_numbers(chat_folder: Path) -> None:
    with bough.load(chat_folder, engine="torch", lanes=2, device_memory="400KB") as runner:

        def ask(num_tokens: int) -> str:
            try:
                return runner.generate([5] * num_tokens, max_tokens=2, ignore_eos=True).finish_reason
            except DoesNotFit as error:
                assert error.needed_bytes > error.budget_bytes == 400 * 1024
                return "does not fit"

        assert run_in_threads([lambda n=number: ask(n) for number in (20, 4_000, 30, 40)]) == [
            "length",
            "does not fit",
            "length",
            "length",
        ]
        check_idle(runner)


def test_two_threads_wait_for_the_prefix_that_a_third_computes(runner: Runner) -> None:
    shared = [3 + each % 90 for each in range(1_500)]
    held = hold_until_queued(runner, 3)
    usages = [
        answer.usage
        for answer in run_in_threads(
            [lambda last=each: runner.generate([*shared, last], max_tokens=1) for each in (91, 92, 93)]
        )
    ]
    held.result()
    assert sum(usage.computed_tokens for usage in usages) == len(shared) + 3


def test_a_thread_that_dies_with_its_stream_frees_the_lane(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))

    def die() -> None:
        stream = runner.stream(PROMPT, **ENDLESS)
        next(stream)
        raise ValueError("the thread dies")

    thread = threading.Thread(target=die)
    thread.start()
    thread.join(BOUND_S)
    assert str(died.pop()) == "the thread dies"
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_call_of_the_cache_sees_no_lane_of_a_request_that_was_left(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_stepped = watch_steps(runner, monkeypatch)
    stream = runner.stream(PROMPT, **ENDLESS)
    next(stream)
    assert has_stepped.wait(BOUND_S)
    assert runner.cache.stats()["busy_lanes"] == 1
    stream.close()
    assert runner.cache.stats()["busy_lanes"] == 0
