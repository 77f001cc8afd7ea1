"""Sampling on tensors of a GPU. What both engines' samplers do alike is tested in tests/sampling."""

from __future__ import annotations

import pytest
import torch

from bough.engines.torch.sampling import sample
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
