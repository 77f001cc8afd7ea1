"""Requests of tasks: cancelled, left, raised from, and those of an event loop that ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import bough
from bough import Completion, RequestError, Runner
from tests.runner.long_answers import ENDLESS, PROMPT, count_cached, watch_steps
from tests.waiting import BOUND_S

Work = Callable[[Runner], Awaitable[None]]


def test_tasks_get_the_answers_that_threads_get(runner: Runner) -> None:
    prompts = [[3 + each, 4, 5, 6] for each in range(12)]

    async def ask() -> list[Completion]:
        return list(await asyncio.gather(*(runner.agenerate(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts)))

    alone = [runner.generate(prompt, max_tokens=5, ignore_eos=True).token_ids for prompt in prompts]
    assert [answer.token_ids for answer in asyncio.run(ask())] == alone


def test_a_stream_of_a_task_gives_the_pieces_of_the_answer(runner: Runner) -> None:
    async def read() -> tuple[list[str], str, str]:
        pieces: list[Any] = [piece async for piece in runner.astream(PROMPT, max_tokens=9, ignore_eos=True)]
        texts = [text async for text in runner.astream_text(PROMPT, max_tokens=9, ignore_eos=True)]
        return [piece.text for piece in pieces[:-1]], "".join(texts), pieces[-1].text

    pieces, text, whole = asyncio.run(read())
    assert "".join(pieces) == text == whole == runner.generate(PROMPT, max_tokens=9, ignore_eos=True).text


async def cancel_a_request(runner: Runner) -> None:
    task = asyncio.ensure_future(runner.agenerate(PROMPT, **ENDLESS))
    await first_piece(runner)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def first_piece(runner: Runner) -> None:
    """Wait for the first piece of another answer to the same prompt: the prompt is computed then."""
    stream = runner.astream(PROMPT, **ENDLESS)
    await anext(stream)
    await stream.aclose()


async def cancel_several_choices(runner: Runner) -> None:
    is_computed = asyncio.Event()  # no piece of another answer: there may be no lane for that
    told: Any = {"on_progress": lambda done, total: is_computed.set() if done == total else None}
    task = asyncio.ensure_future(runner.agenerate(PROMPT, n=4, **ENDLESS, **told))
    await is_computed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_before_it_begins(runner: Runner) -> None:
    task = asyncio.ensure_future(runner.agenerate(PROMPT, **ENDLESS))
    await asyncio.sleep(0)
    task.cancel()
    await first_piece(runner)


async def run_out_of_time(runner: Runner) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await runner.abatch([PROMPT] * 5, **ENDLESS)
    await first_piece(runner)


async def leave_by_break(runner: Runner) -> None:
    async for _ in runner.astream(PROMPT, **ENDLESS):
        break


async def leave_text_by_break(runner: Runner) -> None:
    async for _ in runner.astream_text(PROMPT, **ENDLESS):
        break


async def leave_in_a_cycle(runner: Runner) -> None:
    cycle: list[Any] = [runner.astream(PROMPT, **ENDLESS)]
    cycle.append(cycle)
    await anext(cycle[0])
    del cycle
    gc.collect()
    await asyncio.sleep(0)


async def fail_in_is_cancelled(runner: Runner) -> None:
    await first_piece(runner)
    with pytest.raises(ZeroDivisionError):
        await runner.agenerate(PROMPT, **ENDLESS, is_cancelled=lambda: bool(1 / 0))


async def fail_in_on_progress(runner: Runner) -> None:
    with pytest.raises(ZeroDivisionError):
        await runner.agenerate(PROMPT, **ENDLESS, on_progress=lambda done, total: print(1 / 0))
    await first_piece(runner)


async def fail_in_on_done(runner: Runner) -> None:
    with pytest.raises(ZeroDivisionError):
        await runner.abatch([PROMPT] * 5, max_tokens=1, on_done=lambda number, answer: print(1 / 0))


WORK = [
    cancel_a_request,
    cancel_several_choices,
    cancel_before_it_begins,
    run_out_of_time,
    leave_by_break,
    leave_text_by_break,
    leave_in_a_cycle,
    fail_in_is_cancelled,
    fail_in_on_progress,
    fail_in_on_done,
]


@pytest.mark.parametrize("work", WORK)
def test_however_a_request_of_a_task_ends_its_lane_is_idle_and_its_work_kept(work: Work, runner: Runner) -> None:
    async def run() -> None:
        await work(runner)

    asyncio.run(run())
    assert runner.cache.stats()["busy_lanes"] == 0
    assert count_cached(runner) == len(PROMPT) - 1


def test_is_cancelled_ends_the_answer_of_a_task_where_it_is(runner: Runner) -> None:
    answers = iter([False, False])
    answer = asyncio.run(runner.agenerate(PROMPT, **ENDLESS, is_cancelled=lambda: next(answers, True)))
    assert answer.finish_reason == "cancelled"


def test_a_run_that_raises_ends_the_requests_of_its_other_tasks(runner: Runner) -> None:
    async def fail() -> None:
        stream = runner.astream(PROMPT, **ENDLESS)
        await anext(stream)  # it has a lane before the others do
        tasks = [asyncio.ensure_future(runner.agenerate(PROMPT, **ENDLESS)) for _ in range(4)]
        await anext(stream)
        assert tasks
        raise LookupError("the loop ends")

    with pytest.raises(LookupError):
        asyncio.run(fail())
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_loop_that_is_closed_frees_the_lane_of_a_stream_that_is_still_held(runner: Runner) -> None:
    loop, stream = asyncio.new_event_loop(), runner.astream(PROMPT, **ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    runner.cache.stats()  # a step follows, whose token finds no reader
    assert runner.cache.stats()["busy_lanes"] == 0
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_loop_that_is_stopped_and_closed_frees_the_lane_of_the_task_that_waits(runner: Runner) -> None:
    loop = asyncio.new_event_loop()

    async def read() -> None:
        pieces = runner.astream(PROMPT, **ENDLESS)
        await anext(pieces)
        loop.stop()
        async for _ in pieces:
            pass

    task = loop.create_task(read())
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    runner.cache.stats()
    assert runner.cache.stats()["busy_lanes"] == 0
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is left on purpose
    del task
    gc.collect()
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_stopped_loop_goes_on_where_it_was(runner: Runner) -> None:
    loop = asyncio.new_event_loop()
    stream = runner.astream(PROMPT, max_tokens=20, ignore_eos=True)

    async def read_all() -> list[Any]:
        return [piece async for piece in stream]

    loop.run_until_complete(anext(stream))
    count_cached(runner)  # pieces come while the loop does not run
    pieces = loop.run_until_complete(read_all())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert isinstance(pieces[-1], Completion)
    assert len(pieces[-1].token_ids) == 20


def test_a_stream_cannot_be_read_in_another_loop(runner: Runner) -> None:
    loop, stream = asyncio.new_event_loop(), runner.astream(PROMPT, **ENDLESS)
    loop.run_until_complete(anext(stream))

    async def read_all() -> None:
        async for _ in stream:
            pass

    with pytest.raises(RequestError, match="was begun in another event loop"):
        asyncio.run(read_all())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_closing_the_runner_ends_what_tasks_wait_for(chat_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bough.load(chat_folder, engine="torch", lanes=2)
    has_stepped = watch_steps(runner, monkeypatch)

    def close() -> None:
        assert has_stepped.wait(BOUND_S)
        runner.close()

    closer = threading.Thread(target=close)
    closer.start()

    async def ask() -> list[BaseException | Completion]:
        return await asyncio.gather(*(runner.agenerate(PROMPT, **ENDLESS) for _ in range(5)), return_exceptions=True)

    assert [str(each) for each in asyncio.run(ask())] == ["the runner is closed"] * 5
    closer.join(BOUND_S)


def test_the_loop_goes_on_while_a_request_runs(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    has_turned, step = threading.Event(), runner.runtime.engine.step

    def step_after_a_turn(lanes: Any, ids: Any) -> Any:
        has_turned.clear()
        assert has_turned.wait(BOUND_S), "the loop does not turn"
        return step(lanes, ids)

    monkeypatch.setattr(runner.runtime.engine, "step", step_after_a_turn)

    async def ask() -> Completion:
        task = asyncio.ensure_future(runner.agenerate(PROMPT, max_tokens=30, ignore_eos=True))
        while not task.done():
            has_turned.set()
            await asyncio.sleep(0)
        return task.result()

    assert len(asyncio.run(ask()).token_ids) == 30
