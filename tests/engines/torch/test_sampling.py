"""Sampling on tensors of a GPU. What both engines' samplers do alike is tested in tests/sampling."""

from __future__ import annotations

import pytest
import torch

from bough.engines.torch.sampling import sample, score, score_on_device
from tests.sampling.draws import make_many_draws


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_chooses_what_the_cpu_chooses():
    rows = list(torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)).mul(3).to(torch.bfloat16))
    draws = make_many_draws(len(rows), vocab_size=5000)

    on_cpu, on_gpu = sample(rows, draws), sample([row.cuda() for row in rows], draws)

    assert [each.token_id for each in on_gpu] == [each.token_id for each in on_cpu]
    assert [[other.token_id for other in each.top] for each in on_gpu] == [
        [other.token_id for other in each.top] for each in on_cpu
    ]


def test_log_probabilities_by_the_device_are_those_by_the_host():
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)).mul(4).to(torch.bfloat16)
    rows[1, 7:9] = 9.0  # equal ones

    by_device, by_host = score_on_device(rows, [1, 2, 3, 4, 5], 6), score(rows, [1, 2, 3, 4, 5], 6)

    for found, expected in zip(by_device, by_host, strict=True):
        assert found.token_id == expected.token_id and found.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [each.token_id for each in found.top] == [each.token_id for each in expected.top]
        assert [each.logprob for each in found.top] == pytest.approx([each.logprob for each in expected.top], abs=1e-5)
