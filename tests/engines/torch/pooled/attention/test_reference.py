"""The plain attention over a pool, against a softmax over each lane's rows."""

from __future__ import annotations

import pytest
import torch

from bough.engines.shared.pool.plan import PAGE, PlanShape, make_plan
from bough.engines.torch.pooled.attention.bucket import StepBucket
from bough.engines.torch.pooled.attention.buffers import PlanBuffers, gather_rows, write_rows
from tests.engines.torch.pooled.attention_case import Case, run_step, run_tokens

CASES = [
    Case(),
    Case(heads=1, group=1, dim=64),
    Case(group=3, dim=80),
    Case(group=8, dim=96, window=200),
    Case(heads=3, group=4, softcap=5.0),
    Case(window=330, softcap=5.0, has_sinks=True),
    Case(has_sinks=True, has_shared=False),
    Case(heads=1, dim=256, window=300),
]


def by_device(bucket: StepBucket) -> None:
    """The buffers choose what computes."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_a_softmax_over_the_rows_of_each_lane(case: Case, seed: int) -> None:
    outcome = run_step(case, by_device, seed=seed)

    outcome.check(1e-5)
    assert outcome.plan.has_shared == case.has_shared


def test_lanes_without_a_common_row_are_computed_alone() -> None:
    outcome = run_step(Case(), by_device, prefix=0)

    outcome.check(1e-5)
    assert not outcome.plan.has_shared


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("past", "num"), [(0, 1), (0, 9), (700, 20), (250, 20)])
def test_a_token_of_a_run_sees_the_rows_before_it(case: Case, past: int, num: int) -> None:
    run_tokens(case, by_device, past=past, num=num).check(1e-5)


def test_a_window_may_begin_in_the_slot_that_a_lane_grows_in() -> None:
    run_step(Case(window=40), by_device).check(1e-5)


def test_a_window_may_begin_in_a_later_slot_of_an_item() -> None:
    outcome = run_tokens(Case(window=200, max_parts=3), by_device, past=700, num=5)

    assert outcome.plan.rows_of_item >= 3 * PAGE
    outcome.check(1e-5)


def test_rows_that_are_written_to_places_come_back_from_them() -> None:
    rows = torch.zeros(3, 2, 2, PAGE, 16)
    k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    places = torch.tensor([PAGE + 255, 2 * PAGE, -1, 7, 8], dtype=torch.int32)

    write_rows(k, v, rows, places)
    found_k, found_v = gather_rows(rows, places)

    is_row = (places >= 0)[:, None]
    assert torch.equal(found_k, torch.where(is_row, k, 0.0))
    assert torch.equal(found_v, torch.where(is_row, v, 0.0))
    assert torch.equal(rows[1, 0, :, 255], k[0, :, 0])
    assert rows.count_nonzero() == 2 * 4 * 2 * 16


def test_a_plan_that_a_bucket_cannot_take_is_refused_with_the_numbers() -> None:
    bucket = StepBucket(2, 1, 1, 16, torch.float32, torch.device("cpu"), max_parts=1)
    buffers = PlanBuffers(bucket)
    roomy = PlanShape(1, 16, 8, 8, buffers.shape.programs)

    with pytest.raises(ValueError, match="1 entries, 2 parts and 2 items: the bucket takes 2, 1 and 4096"):
        buffers.put(make_plan([[(0, 0, 256), (1, 256, 512)]], [256], roomy))
