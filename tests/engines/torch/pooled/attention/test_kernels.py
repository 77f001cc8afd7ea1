"""The Triton kernels, against their reference in plain torch and against a softmax over each lane's rows.

They run on a GPU, or anywhere by Triton's interpreter (`make test-kernels`); else there is nothing to run them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from bough.engines.shared.pool.plan import PAGE
from bough.engines.torch.pooled.attention import reference
from bough.engines.torch.pooled.attention.bucket import StepBucket
from tests.engines.torch.pooled.attention_case import Case, Choice, run_step, run_tokens

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not IS_INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

from bough.engines.torch.pooled.attention import launches  # noqa: E402
from bough.engines.torch.pooled.attention.launches import Card, Tiles, TritonAttention, choose_tiles  # noqa: E402

OF_INTERPRETER = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
pytestmark = [OF_INTERPRETER] if IS_INTERPRETED else [pytest.mark.cuda]
DEVICE, DTYPE, TOLERANCE = ("cpu", torch.float32, 1e-5) if IS_INTERPRETED else ("cuda", torch.bfloat16, 2e-2)
H200 = Card(132, 228 * 1024, has_tma=True)
A100 = Card(108, 164 * 1024, has_tma=False)
L4 = Card(58, 100 * 1024, has_tma=False)


def by_kernels(bucket: StepBucket, *, has_tma: bool = True) -> TritonAttention:
    """On a GPU as it is; the interpreter plays a small card, on which each program has several units."""
    card = Card(3, 228 * 1024, has_tma=True) if IS_INTERPRETED else Card.of(bucket.device)
    return TritonAttention(bucket, replace(card, has_tma=has_tma and card.has_tma))


def without_tma(bucket: StepBucket) -> TritonAttention:
    return by_kernels(bucket, has_tma=False)


def here(case: Case) -> Case:
    return replace(case, device=DEVICE, dtype=DTYPE)


STEPS = [
    Case(heads=1, group=1, dim=16),
    Case(heads=2, group=4, dim=64),
    Case(heads=1, group=3, dim=80),
    Case(heads=1, group=8, dim=96, window=200),
    Case(heads=1, group=4, dim=128, softcap=5.0),
    Case(heads=1, group=2, dim=256),
    Case(heads=2, group=2, dim=16, window=330, softcap=5.0, has_sinks=True),
    Case(heads=1, group=20, dim=64, has_sinks=True),
    Case(heads=2, group=2, dim=64, has_shared=False),
]


@pytest.mark.parametrize("case", STEPS, ids=str)
@pytest.mark.parametrize("choice", [by_kernels, without_tma])
def test_a_step_is_a_softmax_over_the_rows_of_each_lane(case: Case, choice: Choice) -> None:
    run_step(here(case), choice, num_lanes=4, prefix=570).check(TOLERANCE)


@pytest.mark.parametrize("case", STEPS, ids=str)
@pytest.mark.parametrize(("past", "num"), [(560, 12), (0, 5)])
def test_a_token_of_a_run_sees_the_rows_before_it(case: Case, past: int, num: int) -> None:
    run_tokens(here(case), by_kernels, past=past, num=num).check(TOLERANCE)


def test_a_window_may_begin_in_the_slot_that_a_lane_grows_in() -> None:
    run_step(here(Case(window=40)), by_kernels).check(TOLERANCE)


def test_a_window_may_begin_in_a_later_slot_of_an_item() -> None:
    outcome = run_tokens(here(Case(window=200, max_parts=3)), by_kernels, past=700, num=5)

    assert outcome.plan.rows_of_item >= 3 * PAGE
    outcome.check(TOLERANCE)


def test_a_long_run_has_items_of_more_tokens() -> None:
    run_tokens(here(Case(heads=1, group=1)), by_kernels, past=100, num=254).check(TOLERANCE)


@pytest.mark.parametrize("choice", [by_kernels, without_tma])
def test_the_rows_of_an_item_may_lie_in_eight_slots(choice: Choice) -> None:
    case = here(Case(heads=1, group=2, max_parts=5))

    outcome = run_step(case, choice, num_lanes=2, prefix=2070)

    assert outcome.plan.rows_of_item == 8 * PAGE
    outcome.check(TOLERANCE)


@pytest.mark.parametrize("case", STEPS[:3], ids=str)
def test_kernels_and_reference_agree_bit_for_bit_on_the_rows_and_closely_on_the_results(case: Case) -> None:
    def by_reference(bucket: StepBucket) -> reference.PlainAttention:
        return reference.PlainAttention(bucket)

    ours, theirs = run_step(here(case), by_kernels, seed=4), run_step(here(case), by_reference, seed=4)

    assert torch.equal(ours.rows.nan_to_num(nan=7.0), theirs.rows.nan_to_num(nan=7.0))
    assert (ours.output - theirs.output).norm() < TOLERANCE * theirs.output.norm()


@pytest.mark.parametrize(("num", "dim"), [(5, 16), (600, 16), (40, 80)])
def test_rows_go_to_their_places_and_come_back_as_by_the_reference(num: int, dim: int) -> None:
    layers, heads, slots = 2, 2, 4
    pool = torch.full((slots, 2, layers, heads, PAGE, dim), float("nan"), dtype=DTYPE, device=DEVICE)
    k, v = (torch.randn(1, num, heads, dim).to(DEVICE, DTYPE).transpose(1, 2) for _ in "kv")
    places = torch.randperm(slots * PAGE)[:num].to(DEVICE, torch.int32)
    places[::7] = -1
    expected = pool.clone()
    reference.write_rows(k, v, expected[:, :, 1], places)

    launches.write_rows(k, v, pool[:, :, 1], places)
    found = launches.gather_rows(pool[:, :, 1], places)

    assert torch.equal(pool.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    for ours, theirs in zip(found, reference.gather_rows(pool[:, :, 1], places), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("card", "entries", "dim", "is_run", "tiles"),
    [
        (H200, 64, 128, False, Tiles(64, 3, 4, 264)),  # (64 + 6 x 64) rows of 256 bytes: 112 of 114 KiB
        (H200, 64, 80, False, Tiles(64, 3, 4, 264)),  # as 128
        (H200, 64, 256, False, Tiles(32, 2, 4, 264)),  # (64 + 4 x 32) rows of 512 bytes: 96 KiB
        (H200, 512, 128, True, Tiles(64, 3, 8, 132)),  # one program with products of 128 rows: 128 of 228 KiB
        (H200, 512, 256, True, Tiles(32, 2, 4, 264)),  # whose result would not fit into registers
        (A100, 64, 128, False, Tiles(64, 2, 4, 216)),  # 80 of 82 KiB
        (L4, 64, 128, False, Tiles(32, 2, 4, 116)),  # 48 of 50 KiB
        (L4, 64, 256, False, Tiles(16, 2, 4, 116)),  # 64 KiB: only one program at a time
    ],
)
def test_programs_fit_into_shared_memory_together(card: Card, entries: int, dim: int, is_run: bool, tiles: Tiles) -> None:
    bucket = StepBucket(entries, 8, 4, dim, torch.bfloat16, torch.device("cpu"), is_run)

    assert choose_tiles(bucket, card) == tiles
