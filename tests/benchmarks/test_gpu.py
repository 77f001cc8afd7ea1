"""The parts of `python -m benchmarks gpu` over the fake engine: what is measured, and what a failed part leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from benchmarks.gpu import start
from benchmarks.gpu.decode import GREEDY, decoding, measure_decode, shared_case
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.first_token import measure_first
from benchmarks.gpu.kernels import count_kernels
from benchmarks.gpu.memory import measure_memory
from benchmarks.gpu.page_in import measure_page_in
from benchmarks.gpu.run import GpuReport, run_parts
from benchmarks.gpu.setup import GpuSetup
from bough.bench.workload import SHAPES
from bough.cache.residency.memory import Tiers
from bough.config import Settings
from bough.errors import EngineError, RequestError
from bough.models import Tokenizer
from bough.runtime import Runtime
from tests.fakes import FakeEngine

SETUP = GpuSetup(
    SHAPES["tiny"], tokens=300, lanes=(1, 3), distinct=2, steps=4, warm_tokens=2, rounds=2, rest_s=0, new_tokens=(5,)
)
ROW_BYTES = 8  # of the fake engine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(has_host=True)


@pytest.fixture
def driver(engine: FakeEngine) -> Iterator[Driver]:
    with closing(make_runtime(engine)) as runtime:
        yield Driver(runtime)
    assert not engine.live


def make_runtime(engine: FakeEngine) -> Runtime:
    tiers = Tiers(engine, host_bytes=1 << 20) if engine.has_host else None
    return Runtime(engine, Tokenizer(None), Settings(lanes=SETUP.num_lanes), tiers=tiers)


def test_every_case_is_decoded_greedily_and_sampled_and_leaves_every_lane_idle(driver: Driver) -> None:
    figures = list(measure_decode(driver, SETUP))

    cases = ("1 on one prefix", "3 on one prefix", "2 distinct")
    endings = (", greedy", ", sampled", ": sampled against greedy")
    assert [each.name for each in figures] == [case + ending for case in cases for ending in endings]
    assert all(len(each.detail["window_ms"]) == SETUP.windows for each in figures if each.unit == "ms a token")
    assert {"step", "sample"} <= set(figures[0].detail["engine_ms"])
    assert driver.runtime.prefix_cache.lanes.num_busy == 0


def test_requests_on_one_prefix_compute_it_once(driver: Driver, engine: FakeEngine) -> None:
    with decoding(driver, SETUP, shared_case(SETUP, engine.vocab_size, 3), GREEDY) as deliveries:
        prompts = sum(count for count in engine.evaluated if count > 1)

        assert prompts == SETUP.tokens + 3 * SETUP.tail_tokens
        assert all(len(each.token_s) >= SETUP.warm_tokens and not each.is_over for each in deliveries)


def test_a_window_that_a_request_does_not_live_to_see_is_an_error(driver: Driver) -> None:
    delivery = driver.answer([1, 2, 3], max_tokens=2)

    with pytest.raises(EngineError, match="ended too soon: length, 2 tokens; the requests have 2 to 2 tokens"):
        driver.turn_until(lambda: False, [delivery])


def test_first_tokens_are_of_prompts_that_are_as_well_known_as_they_claim(driver: Driver) -> None:
    cold, again, cached, longer = measure_first(driver, SETUP)

    assert cold.detail["cached_tokens"] == again.detail["cached_tokens"] == [0, 0]
    assert (cached.detail["cached_tokens"], cached.detail["computed_tokens"]) == ([299, 299], [1, 1])
    assert (longer.detail["cached_tokens"], longer.detail["computed_tokens"]) == ([300, 300], [5, 5])


def test_a_prompt_comes_back_from_the_host_as_a_whole_each_time(driver: Driver) -> None:
    first, alone, rate = measure_page_in(driver, SETUP)

    assert len(set(first.detail["host_bytes"])) == 1
    assert first.detail["host_bytes"][0] >= (SETUP.tokens - 1) * ROW_BYTES
    assert len(alone.detail["round_ms"]) == SETUP.rounds and rate.unit == "GB/s"


def test_memory_is_counted_against_one_prefix_and_the_tails(driver: Driver) -> None:
    lanes, resting = measure_memory(driver, SETUP)

    tails = (lanes.detail["rows_bytes"] // ROW_BYTES) - SETUP.tokens
    assert 3 * SETUP.tail_tokens < tails < 3 * (SETUP.tail_tokens + 20)
    assert lanes.value == round(lanes.detail["used_bytes"] / lanes.detail["rows_bytes"], 3)
    assert resting.detail["rows_bytes"] == 5 * (SETUP.tokens + 3) * ROW_BYTES
    assert resting.detail["idle_lanes_with_rows"] == 5


def last(reports: Iterator[GpuReport]) -> GpuReport:
    *_, report = reports
    return report


def test_a_part_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.load_made_model", lambda shape, settings: make_runtime(FakeEngine()))

    report = last(run_parts(SETUP, ["memory", "restore", "first"]))

    assert report.errors == {"restore": "there is no host tier on unknown: nothing can be brought back from host memory"}
    assert [len(report.figures[part]) for part in ("first", "restore", "memory")] == [4, 0, 2]


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(shape: Any, settings: Any) -> Runtime:
        raise RequestError("no such shape")

    monkeypatch.setattr("benchmarks.gpu.run.load_made_model", load)

    assert last(run_parts(SETUP, ["decode"])).errors == {"load": "no such shape"}


def test_an_engine_that_warms_up_is_waited_for_and_another_is_ready() -> None:
    engine: Any = FakeEngine()
    assert start.wait_until_ready(engine, 1)
    engine.wait_until_ready = lambda timeout_s: timeout_s > 5

    assert start.wait_until_ready(engine, 9)
    assert not start.wait_until_ready(engine, 1)


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(EngineError, match=r"benchmarks.gpu.http ended with 1: .*missing .* argument: 'shape'"):
        start.run_child("benchmarks.gpu.http", {}, {})


def test_kernels_are_counted_for_one_step() -> None:
    a = torch.ones(8, 8)

    kernels = count_kernels(lambda: [a @ a for _ in range(6)] and None, steps=3)

    assert next(each.runs for each in kernels if each.name == "aten::mm") == 2
    assert kernels == sorted(kernels, key=lambda each: -each.microseconds)
