"""A task waits for results of other threads, and for many pieces of work of which some run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bough.errors import BoughError, EngineError
from bough.system.tasks import gather, wait_for

Hear = Callable[[int | BoughError], None]


@pytest.mark.parametrize("call", [None, asyncio.to_thread])
def test_a_task_gets_the_first_result_or_error(call: Any) -> None:
    def start(outcome: int | BoughError, hear: Hear, is_cancelled: Callable[[], bool]) -> None:
        hear(outcome)
        hear(0)  # too late

    async def work() -> None:
        assert await wait_for(partial(start, 5), call) == 5
        with pytest.raises(EngineError, match="lost"):
            await wait_for(partial(start, EngineError("lost")), call)

    asyncio.run(work())


def test_a_result_after_the_end_of_the_loop_has_no_effect() -> None:
    started: list[tuple[Hear, Callable[[], bool]]] = []

    async def work() -> None:
        task = asyncio.create_task(wait_for(lambda hear, is_cancelled: started.append((hear, is_cancelled))))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(work())
    ((hear, is_cancelled),) = started

    assert is_cancelled()
    hear(1)


def test_so_many_run_at_a_time_and_results_keep_their_order() -> None:
    running, most = set[int](), list[int]()

    async def square(number: int) -> int:
        running.add(number)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(number)
        return number * number

    found = asyncio.run(gather([partial(square, number) for number in range(20)], 3))

    assert found == [number * number for number in range(20)]
    assert max(most) == 3


def test_if_one_fails_the_others_have_ended_when_its_error_is_raised() -> None:
    ended: list[int] = []

    async def run(number: int) -> None:
        try:
            await asyncio.sleep(0 if number == 1 else 3600)
            raise EngineError("out of numbers")
        finally:
            ended.append(number)

    async def work() -> None:
        with pytest.raises(EngineError, match="out of numbers"):
            await gather([partial(run, number) for number in range(4)], 3)
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(work())
