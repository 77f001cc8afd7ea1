"""The lock of the engine: one thread at a time, and nothing in the middle of a step."""

from __future__ import annotations

import signal
import threading

import pytest

from bough.runner.engine_lock import EngineLock


class Steps:
    """Something to close, which notes when that happened."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_ctrl_c_while_the_lock_is_held_is_raised_when_it_is_released() -> None:
    lock, reached = EngineLock(), False
    with pytest.raises(KeyboardInterrupt), lock:
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with EngineLock():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_closed_while_the_lock_is_held_waits_for_its_release() -> None:
    lock, steps = EngineLock(), Steps()
    with lock:
        with lock:
            lock.close(steps)
        assert not steps.is_closed
    assert steps.is_closed


def test_what_is_closed_outside_is_closed_at_once() -> None:
    steps = Steps()
    EngineLock().close(steps)
    assert steps.is_closed


def test_a_second_thread_waits_for_the_lock() -> None:
    lock, order = EngineLock(), []

    def other() -> None:
        with lock:
            order.append("other")

    with lock:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(5)
    assert order == ["first", "other"]
