"""Every sampler against the definition in plain Python, over cases of all kinds and over larger vocabularies."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bough.types import Draw, SamplingParams, TokenCounts
from tests import reference_sampler as reference
from tests.sampling.draws import bits, make_many_draws
from tests.sampling.samplers import MLX, SAMPLERS, TORCH, Sampler

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """A row of logits, as numbers that `dtype` holds exactly, and a draw."""

    values: list[float]
    dtype: str
    draw: Draw


LOGITS = st.one_of(st.floats(-20, 20, allow_subnormal=False), st.integers(-8, 8).map(lambda n: n / 2), st.just(-math.inf))


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    biases = st.one_of(st.just(-100.0), st.just(100.0), st.floats(-5, 5, allow_subnormal=False))
    return SamplingParams(
        logit_bias=tuple(draw(st.dictionaries(st.integers(0, vocab_size - 1), biases, max_size=4)).items()),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.integers(0, 12)),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        top_n_sigma=draw(st.one_of(st.just(0.0), st.floats(0.01, 4.0))),
        repeat_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 3.0))),
        presence_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        frequency_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 5))),
    )


@st.composite
def cases(draw: st.DrawFn, vocab_size: int) -> Case:
    """A row of logits and a draw whose result no rounding decides; at least one token is possible."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    values = TORCH.row(draw(st.lists(LOGITS, min_size=vocab_size, max_size=vocab_size)), dtype).tolist()
    allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, vocab_size - 1), min_size=1)))
    wanted = Draw(
        draw(sampling_params(vocab_size)),
        uniform=draw(st.floats(0, 1, exclude_max=True)),
        seen=TokenCounts(draw(st.lists(st.integers(0, vocab_size - 1), max_size=8))),
        allowed=None if allowed is None else bits(allowed, vocab_size),
    )
    assume(max(reference.mask(values, wanted.allowed)) > -math.inf)
    assume(not reference.is_near_border(values, wanted))
    assume(not _is_tied_by_rounding(reference.penalise(reference.bias(values, wanted), wanted)))
    return Case(values, dtype, wanted)


def _is_tied_by_rounding(scores: list[float]) -> bool:
    """Whether two scores differ by so little that a penalty computed in another order could make them equal."""
    ordered = sorted(scores)
    return any(0 < high - low < 1e-9 for low, high in pairwise(ordered))


@every_sampler
@settings(max_examples=150)
@given(batch=st.integers(1, 20).flatmap(lambda vocab_size: st.lists(cases(vocab_size), min_size=1, max_size=4)))
def test_each_row_of_a_batch_is_sampled_as_the_reference_defines(sampler: Sampler, batch: list[Case]):
    results = sampler.sample([sampler.row(case.values, case.dtype) for case in batch], [case.draw for case in batch])

    for case, result in zip(batch, results, strict=True):
        expected = reference.sample(case.values, case.draw)
        assert result.token_id == expected.token_id
        assert [each.token_id for each in result.top] == [each.token_id for each in expected.top]
        if expected.logprob is not None:
            assert result.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [each.logprob for each in result.top] == pytest.approx([each.logprob for each in expected.top], abs=1e-4)


@every_sampler
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_k": 1500, "top_p": 0.99},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.2},
        {"top_n_sigma": 1.5},
        {"top_n_sigma": 2.0, "top_k": 500, "top_p": 0.7},
    ],
)
def test_a_larger_vocabulary_is_sampled_as_the_reference_defines(sampler: Sampler, params: dict[str, float]):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(5)).mul(2).to(torch.bfloat16).tolist()
    wanted = SamplingParams(temperature=1.5, **params)
    draws = [Draw(wanted, uniform=(index + 0.5) / 40) for index in range(40)]
    draws = [
        replace(draw, uniform=draw.uniform + 1e-5) if reference.is_near_border(values, draw) else draw for draw in draws
    ]

    chosen = [each.token_id for each in sampler.sample([sampler.row(values, "bfloat16")] * len(draws), draws)]

    assert chosen == [reference.sample(values, draw).token_id for draw in draws]


@every_sampler
@settings(max_examples=60)
@given(vocab_size=st.integers(100, 3000), levels=st.integers(1, 200), top_k=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_of_many_equal_logits_the_lowest_ids_are_among_the_largest(
    sampler: Sampler, vocab_size: int, levels: int, top_k: int, seed: int
):
    chance = random.Random(seed)
    values = [-math.inf if level == 0 else level / 16 for level in chance.choices(range(levels + 1), k=vocab_size)]
    draw = Draw(SamplingParams(temperature=1.0, top_k=top_k, logprobs=20), uniform=chance.random())
    assume(max(values) > -math.inf and not reference.is_near_border(values, draw))

    result = sampler.sample([sampler.row(values)], [draw])[0]

    expected = reference.sample(values, draw)
    assert result.token_id == expected.token_id
    assert [each.token_id for each in result.top] == [each.token_id for each in expected.top]


@every_sampler
@settings(max_examples=50)
@given(values=st.lists(LOGITS, min_size=2, max_size=20), uniform=st.sampled_from([0.0, 1.0 - 2**-53]))
def test_the_ends_of_the_unit_interval_never_draw_a_token_without_probability(
    sampler: Sampler, values: list[float], uniform: float
):
    assume(max(values) > -math.inf)
    draw = Draw(SamplingParams(temperature=1.0, top_k=3, top_p=0.9), uniform=uniform)
    assert reference.probabilities(sampler.row(values).tolist(), draw)[sampler.choose(values, draw)] > 0


def test_two_engines_choose_the_same_tokens_from_the_same_logits():
    rows = torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)).mul(3).tolist()
    draws = make_many_draws(len(rows), vocab_size=5000)

    by_torch, by_mlx = (sampler.sample([sampler.row(row) for row in rows], draws) for sampler in (TORCH, MLX))

    assert [each.token_id for each in by_mlx] == [each.token_id for each in by_torch]
    assert [[other.token_id for other in each.top] for each in by_mlx] == [
        [other.token_id for other in each.top] for each in by_torch
    ]
