"""However a request ends, or who waits for it: its lane is idle, its work is kept, nothing hangs."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bough
from bough import Completion, RequestError, Runner
from bough.runner import delivery
from tests.runner.conftest import check_idle
from tests.runner.long_answers import ENDLESS, PROMPT, count_cached, watch_steps
from tests.waiting import BOUND_S

# Streams that are left


def leave_by_close(runner: Runner) -> None:
    stream = runner.stream(PROMPT, **ENDLESS)
    next(stream)
    stream.close()


def leave_by_dropping(runner: Runner) -> None:
    next(runner.stream(PROMPT, **ENDLESS))


def leave_text_by_dropping(runner: Runner) -> None:
    next(runner.stream_text(PROMPT, **ENDLESS))


def leave_by_break(runner: Runner) -> None:
    for _ in runner.stream(PROMPT, **ENDLESS):
        break


def leave_by_error(runner: Runner) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in runner.stream(PROMPT, **ENDLESS):
            _ = 1 / 0


def leave_in_a_cycle(runner: Runner) -> None:
    cycle: list[Any] = [runner.stream(PROMPT, **ENDLESS)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


LEAVE = [leave_by_close, leave_by_dropping, leave_text_by_dropping, leave_by_break, leave_by_error, leave_in_a_cycle]


@pytest.mark.parametrize("leave", LEAVE)
def test_a_stream_that_is_left_frees_its_lane_and_keeps_its_work(leave: Callable[[Runner], None], runner: Runner) -> None:
    leave(runner)
    assert runner.cache.stats()["busy_lanes"] == 0
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_stream_that_was_never_begun_takes_no_lane(runner: Runner) -> None:
    stream = runner.stream(PROMPT, **ENDLESS)
    assert runner.cache.stats()["busy_lanes"] == 0
    stream.close()
    assert count_cached(runner) == 0


def test_a_stream_keeps_its_runner(chat_folder: Path) -> None:
    stream = bough.load(chat_folder, engine="torch").stream(PROMPT, max_tokens=3, ignore_eos=True)
    gc.collect()
    *_, last = stream
    assert isinstance(last, Completion)
    assert last.finish_reason == "length"


# Callbacks


def fail(*args: Any) -> bool:
    raise LookupError("the callback fails")


def fail_in_is_cancelled(runner: Runner) -> None:
    runner.generate(PROMPT, **ENDLESS, is_cancelled=fail)


def fail_in_is_cancelled_of_a_stream(runner: Runner) -> None:
    for _ in runner.stream(PROMPT, **ENDLESS, is_cancelled=fail):
        pass


def fail_in_is_cancelled_of_a_batch(runner: Runner) -> None:
    runner.batch([PROMPT] * 5, **ENDLESS, is_cancelled=fail)


def fail_in_on_progress(runner: Runner) -> None:
    runner.generate(PROMPT, **ENDLESS, on_progress=fail)


def fail_in_on_progress_of_a_choice(runner: Runner) -> None:
    runner.generate(PROMPT, n=3, **ENDLESS, on_progress=fail)


def fail_in_on_done(runner: Runner) -> None:
    runner.batch([PROMPT] * 5, max_tokens=1, on_done=fail)


FAIL = [
    fail_in_is_cancelled,
    fail_in_is_cancelled_of_a_stream,
    fail_in_is_cancelled_of_a_batch,
    fail_in_on_progress,
    fail_in_on_progress_of_a_choice,
    fail_in_on_done,
]


@pytest.mark.parametrize("ask", FAIL)
def test_what_a_callback_raises_ends_the_request_and_is_raised(ask: Callable[[Runner], None], runner: Runner) -> None:
    runner.warm(PROMPT)
    with pytest.raises(LookupError, match="the callback fails"):
        ask(runner)
    assert runner.cache.stats()["busy_lanes"] == 0
    assert count_cached(runner) == len(PROMPT) - 1


def test_a_request_that_is_cancelled_while_it_waits_returns_what_there_is(runner: Runner) -> None:
    holders = [runner.stream(PROMPT, **ENDLESS) for _ in range(2)]
    for each in holders:
        next(each)
    answers = iter([False, False, True])
    waiting = runner.generate([9, 8, 7], **ENDLESS, is_cancelled=lambda: next(answers, True))
    assert (waiting.finish_reason, waiting.token_ids) == ("cancelled", ())
    for each in holders:
        each.close()


def test_callbacks_run_on_the_thread_that_asks(runner: Runner) -> None:
    threads = set()

    def note(*_: int) -> bool:
        threads.add(threading.current_thread())
        return False

    runner.generate(PROMPT, max_tokens=2, is_cancelled=note, on_progress=lambda done, total: threads.add(note(done, total)))
    assert threads - {False} == {threading.current_thread()}


# Ctrl-C


@contextlib.contextmanager
def interrupt_when(is_time: threading.Event) -> Iterator[None]:
    """Expect KeyboardInterrupt: a signal comes to the main thread when the event is set."""

    def interrupt() -> None:
        if is_time.wait(BOUND_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    killer.join()


def read_all(runner: Runner) -> None:
    for _ in runner.stream(PROMPT, **ENDLESS):
        pass


ASK: list[Callable[[Runner], object]] = [
    lambda runner: runner.generate(PROMPT, **ENDLESS),
    lambda runner: runner.generate(PROMPT, n=4, **ENDLESS),
    read_all,
    lambda runner: runner.batch([PROMPT] * 5, **ENDLESS),
    lambda runner: runner.send_all(runner.chat().fork(5), "Hello", **ENDLESS),
    lambda runner: runner.chat().send("Hello", **ENDLESS),
]


@pytest.mark.parametrize("ask", ASK, ids=["generate", "choices", "stream", "batch", "send_all", "send"])
def test_ctrl_c_ends_the_request_and_the_runner_goes_on(
    ask: Callable[[Runner], object], runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.warm(PROMPT)
    with interrupt_when(watch_steps(runner, monkeypatch)):
        ask(runner)
    assert runner.cache.stats()["busy_lanes"] == 0
    assert count_cached(runner) == len(PROMPT) - 1


@pytest.mark.parametrize("number", [1, 3])
def test_a_thread_that_waits_wakes_now_and_then_so_that_no_ctrl_c_is_missed(
    number: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal just before a wait does not interrupt it: no wait may be as long as a step, which waits for three here."""
    monkeypatch.setattr(delivery, "_WAKE_S", 0.001)
    engine, worker, waits = runner.runtime.engine, runner.runtime.worker, threading.Semaphore(0)
    step, require_own_process = engine.step, worker.require_own_process

    def step_after_three_waits(lanes: Any, ids: Any) -> Any:
        while waits.acquire(blocking=False):
            pass
        assert all(waits.acquire(timeout=BOUND_S) for _ in range(3))
        return step(lanes, ids)

    def note_wait() -> None:
        require_own_process()
        waits.release()

    monkeypatch.setattr(engine, "step", step_after_three_waits)
    monkeypatch.setattr(worker, "require_own_process", note_wait)

    answers = runner.batch([PROMPT] * number, max_tokens=4, ignore_eos=True)
    answers += [runner.generate(PROMPT, max_tokens=4, ignore_eos=True)]
    assert len({answer.token_ids for answer in answers}) == 1


def test_ctrl_c_while_closing_leaves_the_rest_to_a_second_close(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path)
    runner.generate(PROMPT, max_tokens=1)
    cache, is_closing, goes_on = runner.runtime.prefix_cache.upkeep, threading.Event(), threading.Event()
    close = cache.close

    def close_slowly() -> None:
        is_closing.set()
        assert goes_on.wait(BOUND_S)
        close()

    monkeypatch.setattr(cache, "close", close_slowly)
    with interrupt_when(is_closing):
        runner.close()
    goes_on.set()
    runner.close()
    with bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path) as again:
        assert count_cached(again) == len(PROMPT) - 1


def test_signals_at_any_moment_leave_no_lock_held(runner: Runner) -> None:
    chance, worker = random.Random(5), runner.runtime.worker
    is_armed = False  # a second signal may come when the first has been dealt with

    def stop(number: int, frame: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise TimeoutError("the signal")

    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()  # what is raised in a finalizer is lost
    try:
        for number in range(200):
            with contextlib.suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3), 0.05)
                while True:
                    is_armed = True
                    worker.call(int) if number % 10 else runner.generate([5, 6, 7], max_tokens=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert worker.call(int).result(BOUND_S) == 0


# Closing


def test_closing_ends_what_other_threads_wait_for(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bough.load(chat_folder, engine="torch", lanes=2)
    has_stepped, told = watch_steps(runner, monkeypatch), []
    are_there = threading.Barrier(7)

    def ask() -> None:
        are_there.wait(BOUND_S)
        with pytest.raises(RequestError) as raised:
            runner.generate(PROMPT, **ENDLESS)
        told.append(str(raised.value))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for each in threads:
        each.start()
    are_there.wait(BOUND_S)
    assert has_stepped.wait(BOUND_S)
    runner.close()
    for each in threads:
        each.join(BOUND_S)
    assert told == ["the runner is closed"] * 6


def test_a_closed_runner_refuses_everything_and_says_why(chat_folder: Path) -> None:
    runner = bough.load(chat_folder, engine="torch")
    chat = runner.chat()
    stream, begun = runner.stream(PROMPT, **ENDLESS), runner.stream(PROMPT, **ENDLESS)
    next(begun)
    runner.close()
    runner.close()
    calls: list[Callable[[], object]] = [
        lambda: runner.generate(PROMPT),
        lambda: next(stream),
        lambda: list(begun),
        lambda: runner.batch([PROMPT]),
        lambda: runner.warm(PROMPT),
        lambda: runner.cache.stats(),
        lambda: runner.describe(),
        lambda: chat.send("Hello"),
        lambda: next(chat.stream("Hello")),
        lambda: runner.send_all([chat], "Hello"),
        lambda: runner.embed("Hello"),
        lambda: runner.describe(),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=r"^the runner is closed$"):
            call()
    assert len(chat) == 0


def test_a_runner_that_is_dropped_saves_its_tree_and_releases_its_memory(chat_folder: Path, tmp_path: Path) -> None:
    runner = bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path)
    runner.generate(PROMPT, max_tokens=1)
    thread = next(each for each in threading.enumerate() if each.name == "bough-engine" and is_of(each, runner))
    runtime = weakref.ref(runner.runtime)
    del runner
    gc.collect()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert runtime() is None
    with bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path) as again:
        assert count_cached(again) == len(PROMPT) - 1


def is_of(thread: threading.Thread, runner: Runner) -> bool:
    return runner.runtime.worker.call(threading.current_thread).result() is thread


def test_a_runner_that_is_dropped_unused_releases_its_folder(chat_folder: Path, tmp_path: Path) -> None:
    runner = bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path)
    disk = runner.runtime.prefix_cache.memory.disk
    assert disk is not None
    is_closed, close = threading.Event(), disk.close

    def close_and_tell() -> None:
        close()
        is_closed.set()

    disk.close = close_and_tell  # type: ignore[method-assign]
    del runner
    gc.collect()
    assert is_closed.wait(BOUND_S)
    with bough.load(chat_folder, engine="torch", disk="1G", cache_folder=tmp_path) as again:
        again.generate(PROMPT, max_tokens=1)
        assert again.cache.flush()
        check_idle(again)
