"""Long work in slices between the turns: its share of the time, its turn, its end."""

from __future__ import annotations

import threading

import pytest

from bough.cache.steps import Steps
from bough.errors import EngineStuck, QueueFull
from bough.scheduling.slices import MAX_WAITING, SLICE_S
from tests.scheduling.test_worker import STUCK_S, Stage, holding, quick_watchdog, stage
from tests.waiting import BOUND_S, wait_until

__all__ = ["quick_watchdog", "stage"]  # the fixtures


def test_long_work_runs_in_slices_in_turn_with_others_and_seldom_while_requests_run() -> None:
    stage = Stage()
    now, order = [0.0], []
    stage.worker._clock = lambda: now[0]

    def work(name: str) -> Steps[str]:
        for _ in range(4):
            now[0] += SLICE_S / 2  # two steps make a slice, and a turn takes no time at all
            order.append(name)
            yield
        return name.upper()

    turn = stage.concert.scheduler.turn
    stage.concert.scheduler.turn = lambda: (order.append("turn"), turn())  # type: ignore[method-assign, assignment, func-returns-value]
    with holding(stage.worker):  # so that all are handed over together
        client = stage.submit(1)
        results = [stage.worker.run_in_slices(lambda name=name: work(name)) for name in ("a", "b")]  # type: ignore[misc]
    wait_until(lambda: client.is_done)

    assert [each.result(BOUND_S) for each in results] == ["A", "B"]
    assert client.completion
    before, after = order[: order.index("turn")], order[order.index("turn") :]
    assert before in ([], ["a", "a"])  # at most one slice
    assert after.count("turn") >= 4 and after[: after.count("turn")].count("a") <= 2  # the others waited until nothing ran
    assert [name for name in order if name != "turn"] == ["a", "a", "b", "b"] * 2
    stage.worker.close()


@pytest.mark.parametrize("turn_s", [0.0004, 0.02, 0.25])
@pytest.mark.parametrize("step_s", [SLICE_S, SLICE_S / 100])
def test_slices_get_their_share_beside_turns_of_any_length(turn_s: float, step_s: float) -> None:
    stage = Stage()
    now, order = [0.0], []
    stage.worker._clock = lambda: now[0]

    def work() -> Steps[None]:
        while True:
            now[0] += step_s
            order.append("step")
            yield

    turn = stage.concert.scheduler.turn

    def slow_turn() -> None:
        now[0] += turn_s
        order.append("turn")
        turn()

    stage.concert.scheduler.turn = slow_turn  # type: ignore[method-assign]
    with holding(stage.worker):
        client = stage.submit(1, max_tokens=40)
        endless = [stage.worker.run_in_slices(work) for _ in range(3)]
    wait_until(lambda: client.is_done)
    for each in endless:
        assert each.cancel()
    stage.worker.close()

    while_it_ran = order[order.index("turn") : len(order) - order[::-1].index("turn")]
    num_turns = while_it_ran.count("turn")
    fair_s, slices_s = min(turn_s / 4, 0.01) * num_turns, while_it_ran.count("step") * step_s
    assert num_turns >= 40 and fair_s - 0.01 - step_s < slices_s < 1.2 * fair_s + 0.01 + step_s
    longest = max(map(len, "".join("." if each == "step" else " " for each in while_it_ran).split()), default=0)
    assert longest * step_s < 0.01 + 2 * step_s


def work_without_end(events: list[str]) -> Steps[None]:
    """Notes each step, and which thread has closed it."""
    try:
        while True:
            events.append("step")
            yield
    finally:
        events.append(f"closed by {threading.current_thread().name}")


def test_cancelling_long_work_closes_it_where_it_stands(stage: Stage) -> None:
    events: list[str] = []
    endless = stage.worker.run_in_slices(lambda: work_without_end(events))
    wait_until(lambda: events)
    assert endless.cancel()
    wait_until(lambda: events[-1] != "step")

    assert events[-1] == "closed by bough-engine"
    assert stage.worker.call(lambda: 7).result(BOUND_S) == 7


def test_an_error_of_long_work_goes_to_who_asked_for_it(stage: Stage) -> None:
    def work() -> Steps[None]:
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage.worker.run_in_slices(work).result(BOUND_S)
    assert stage.worker.call(lambda: 7).result(BOUND_S) == 7


def test_many_slices_are_not_taken_for_one_step_that_does_not_end_and_closing_ends_the_work() -> None:
    stage = Stage()

    def work(num_steps: int) -> Steps[int]:
        for _ in range(num_steps):
            stage.pass_time(0.4 * STUCK_S)
            yield
        return num_steps

    results = [stage.worker.run_in_slices(lambda: work(4)) for _ in range(2)]
    stage.worker.close()

    assert [each.result(0) for each in results] == [4, 4]


def test_long_work_behind_a_step_that_does_not_end_is_given_up_and_closed() -> None:
    stage = Stage()
    events: list[str] = []
    endless = stage.worker.run_in_slices(lambda: work_without_end(events))
    wait_until(lambda: events)
    stage.goes_on.clear()
    stage.submit(1)
    stage.stick()
    with pytest.raises(EngineStuck):
        endless.result(BOUND_S)
    with pytest.raises(EngineStuck):
        stage.worker.run_in_slices(lambda: work_without_end(events))

    stage.goes_on.set()
    wait_until(lambda: not stage.worker.is_stuck)
    wait_until(lambda: events[-1] == "closed by bough-engine")
    stage.worker.close()


def test_work_that_nobody_waits_for_is_not_begun_and_too_much_is_refused(stage: Stage) -> None:
    taken: list[str] = []

    def work(name: str) -> Steps[None]:
        taken.append(name)
        yield

    with holding(stage.worker):  # so that none is taken meanwhile
        left = [stage.worker.run_in_slices(lambda: work("for nobody")) for _ in range(MAX_WAITING)]
        for each in left[1:]:
            each.cancel()
        wanted = [stage.worker.run_in_slices(lambda: work("wanted")) for _ in range(MAX_WAITING - 1)]
        with pytest.raises(QueueFull, match=str(MAX_WAITING)):
            stage.worker.run_in_slices(lambda: work("too much"))
    for each in wanted:
        each.result(BOUND_S)

    assert taken == ["for nobody"] + ["wanted"] * (MAX_WAITING - 1)
