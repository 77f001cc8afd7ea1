"""Work in a thread that ends with it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bough.system.threads import run_in_thread


def test_the_thread_is_gone_when_its_work_is_done() -> None:
    used: list[threading.Thread] = []

    def work(number: int) -> int:
        used.append(threading.current_thread())
        return number + 1

    assert asyncio.run(run_in_thread(work, 1)) == 2
    used[0].join(10)
    assert not used[0].is_alive() and used[0] is not threading.current_thread()


def test_what_goes_wrong_comes_back() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(lambda: 1 // 0))
