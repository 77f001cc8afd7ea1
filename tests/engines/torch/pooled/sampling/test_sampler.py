"""The sampler of a device as the engine uses it, where it has no kernels: on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from bough.engines.sampling import NONE_ALLOWED, NOT_FINITE
from bough.engines.torch.pooled.sampling.sampler import DeviceSampler
from bough.engines.torch.sampling import sample
from bough.errors import EngineError
from bough.types import Draw, SamplingParams
from tests.sampling.draws import make_many_draws


def test_choices_have_ids_for_the_next_step_and_the_results_of_sampling():
    rows = torch.randn(14, 500, generator=torch.Generator().manual_seed(1)).mul(3).to(torch.bfloat16)
    draws = make_many_draws(len(rows), vocab_size=500)

    choices = DeviceSampler().launch(rows, draws)

    expected = sample(list(rows), draws)
    assert choices.read() == expected
    assert choices.ids.dtype == torch.int64 and choices.ids.tolist() == [each.token_id for each in expected]


def test_choices_stay_when_the_logits_are_overwritten_and_another_batch_is_launched():
    sampler = DeviceSampler()
    rows = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    first = sampler.launch(rows, [Draw(SamplingParams())] * 2)
    rows.copy_(rows.flip(-1))
    second = sampler.launch(rows, [Draw(SamplingParams())] * 2)

    assert [each.token_id for each in first.read()] == [1, 0]
    assert [each.token_id for each in second.read()] == [1, 2]


@pytest.mark.parametrize(
    ("bad", "allowed", "text"),
    [([0.0, math.nan, 1.0], None, NOT_FINITE), ([-math.inf] * 3, None, NOT_FINITE), ([0.0, 1.0, 2.0], b"\0", NONE_ALLOWED)],
)
def test_a_failed_row_is_told_when_it_is_read_and_leaves_valid_ids(bad: list[float], allowed: bytes | None, text: str):
    rows = torch.tensor([[0.0, 1.0, 2.0], bad, [0.0, 2.0, 1.0]])
    draws = [Draw(SamplingParams()), Draw(SamplingParams(), allowed=allowed), Draw(SamplingParams())]

    choices = DeviceSampler().launch(rows, draws)

    assert choices.ids.tolist() == [2, 0, 1]
    with pytest.raises(EngineError, match=text):
        choices.read()
