"""Sampling on arrays of MLX, as its engine makes them. What both engines' samplers do alike is tested in tests/sampling."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from bough.engines.mlx.sampling import sample
from bough.errors import EngineError
from bough.types import Draw, SamplingParams, TokenCounts
from tests.sampling.draws import make_many_draws


def test_rows_of_one_batch_are_sampled_where_they_lie_as_rows_of_their_own():
    batch = mx.random.normal([24, 400], key=mx.random.key(7)) * 3
    draws = make_many_draws(24, vocab_size=400)
    alone = [sample([mx.array(row.tolist())], [draw])[0] for row, draw in zip(batch, draws, strict=True)]

    together = sample(list(batch), draws)

    assert [each.token_id for each in together] == [each.token_id for each in alone]
    assert [each.top for each in together] == [each.top for each in alone]


def test_rows_that_one_thread_evaluated_are_sampled_in_another():
    rows = [mx.random.normal([400], key=mx.random.key(index)) * 3 for index in range(24)]
    mx.eval(rows)
    draws = make_many_draws(24, vocab_size=400)

    with ThreadPoolExecutor(max_workers=1) as other:
        elsewhere = other.submit(sample, rows, draws).result()

    assert elsewhere == sample(rows, draws)


@pytest.mark.parametrize("place", [0, 31, 399])
def test_greedy_finds_a_broken_logit_in_any_row_of_the_batch_and_at_any_place(place: int):
    broken = [1.0] * 400
    broken[place] = math.nan
    rows = [mx.arange(400.0), mx.array(broken), mx.arange(400.0)]
    with pytest.raises(EngineError, match="not a finite number"):
        sample(rows, [Draw(SamplingParams())] * 3)


@pytest.mark.parametrize("start", [0, 64, 3000])
def test_the_largest_are_found_if_they_lie_side_by_side(start: int):
    values = [-float(token_id) for token_id in range(5000)]
    values[start : start + 20] = range(100, 120)
    draw = Draw(SamplingParams(temperature=1.0, top_k=20, logprobs=20), uniform=0.9)

    result = sample([mx.array(values)], [draw])[0]

    assert result.token_id == start + 19
    assert [each.token_id for each in result.top] == list(reversed(range(start, start + 20)))


@pytest.mark.parametrize("logit", [-20.15625, -20.328125, -20.5, -20.671875, -21.015625])
def test_min_p_keeps_a_token_that_is_only_just_likely_enough(logit: float):
    # The penalty makes the scores doubles, for which rounding could decide if scores alone were compared.
    limit = math.exp(logit / 1.1) * (1 - 1e-15)
    draw = Draw(SamplingParams(temperature=1.1, min_p=limit, repeat_penalty=1.5), uniform=1 - 2**-53, seen=TokenCounts([0]))
    assert sample([mx.array([0.0, logit])], [draw])[0].token_id == 1
