"""Sampling on tensors: the same tokens as the reference in plain Python, and distributions computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bough.errors import EngineError
from bough.torch_engine import sampling
from bough.torch_engine.sampling import sample
from bough.types import Draw, SamplingParams
from tests import reference_sampler as reference

EVENLY = tuple((i + 0.5) / 3000 for i in range(3000))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(each) if each else -math.inf for each in probabilities], dtype=torch.float64)


def bits(allowed: Iterable[int], vocab_size: int) -> bytes:
    mask = sum(1 << token_id for token_id in allowed)
    return mask.to_bytes((vocab_size + 7) // 8, "little")


def shares(logits: torch.Tensor, **params: object) -> list[float]:
    """How often each token is chosen, over evenly spaced draws; `history` and `allowed` go to the draw."""
    extra = {name: params.pop(name) for name in ("history", "allowed") if name in params}
    wanted = SamplingParams(**{"temperature": 1.0, **params})
    draws = [Draw(wanted, uniform=uniform, **extra) for uniform in EVENLY]
    chosen = [each.token_id for each in sample([logits] * len(draws), draws)]
    return [round(chosen.count(token_id) / len(draws), 3) for token_id in range(len(logits))]


def choose(logits: torch.Tensor, draw: Draw | None = None, **params: object) -> int:
    return sample([logits], [draw or Draw(SamplingParams(**params))])[0].token_id


# Greedy


def test_greedy_takes_the_largest_logit():
    assert choose(torch.tensor([0.5, 3.0, -1.0])) == 1


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert choose(torch.tensor([0.0, 2.0, 2.0, 2.0])) == 1
    assert choose(torch.tensor([0.0, 2.0, 2.0, 2.0]), Draw(SamplingParams(), allowed=bits([0, 2, 3], 4))) == 2


def test_greedy_takes_no_notice_of_the_number_drawn():
    logits = torch.tensor([1.0, 1.1])
    assert choose(logits, Draw(SamplingParams(), uniform=0.0)) == choose(logits, Draw(SamplingParams(), uniform=0.999)) == 1


# Distributions computed by hand


def test_a_draw_follows_the_softmax_in_the_order_of_token_ids():
    logits = logs(0.2, 0.5, 0.3)
    chosen = [
        choose(logits, Draw(SamplingParams(temperature=1.0), uniform=each)) for each in (0, 0.19, 0.21, 0.69, 0.71, 0.99)
    ]
    assert chosen == [0, 0, 1, 1, 2, 2]


def test_temperature_divides_the_logits():
    assert shares(logs(0.2, 0.8), temperature=0.5) == [
        pytest.approx(0.04 / 0.68, abs=1e-3),
        pytest.approx(0.64 / 0.68, abs=1e-3),
    ]


def test_a_temperature_near_zero_is_greedy():
    assert shares(logs(0.3, 0.4, 0.3), temperature=1e-300) == [0, 1, 0]


def test_top_k_keeps_the_k_likeliest():
    assert shares(logs(0.1, 0.4, 0.2, 0.3), top_k=2) == [
        0,
        pytest.approx(4 / 7, abs=1e-3),
        0,
        pytest.approx(3 / 7, abs=1e-3),
    ]


def test_top_k_keeps_the_lowest_ids_of_equal_tokens():
    assert shares(logs(0.1, 0.3, 0.3, 0.3), top_k=2) == [0, 0.5, 0.5, 0]


def test_top_k_beyond_the_vocabulary_keeps_everything():
    assert shares(logs(0.25, 0.75), top_k=1000) == [0.25, 0.75]


def test_top_p_keeps_the_smallest_set_with_that_mass():
    assert shares(logs(0.1, 0.4, 0.2, 0.3), top_p=0.69) == [
        0,
        pytest.approx(4 / 7, abs=1e-3),
        0,
        pytest.approx(3 / 7, abs=1e-3),
    ]
    assert shares(logs(0.1, 0.4, 0.2, 0.3), top_p=0.71) == [
        0,
        pytest.approx(4 / 9, abs=1e-3),
        pytest.approx(2 / 9, abs=1e-3),
        pytest.approx(3 / 9, abs=1e-3),
    ]


def test_top_p_keeps_at_least_one_token():
    assert shares(logs(0.3, 0.4, 0.3), top_p=1e-9) == [0, 1, 0]


def test_top_p_counts_the_mass_that_top_k_left():
    # Of 0.4 + 0.3 the first has 4/7 = 0.571, which is enough for 0.57 though it is less than 0.57 of the whole.
    assert shares(logs(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=0.57) == [0, 1, 0, 0]


def test_min_p_keeps_what_has_that_share_of_the_likeliest():
    assert shares(logs(0.1, 0.4, 0.19, 0.31), min_p=0.5) == [
        0,
        pytest.approx(40 / 71, abs=1e-3),
        0,
        pytest.approx(31 / 71, abs=1e-3),
    ]


def test_min_p_of_one_keeps_the_likeliest():
    assert shares(logs(0.1, 0.5, 0.4), min_p=1.0) == [0, 1, 0]


def test_limits_look_at_the_distribution_after_temperature():
    # Squared, 0.6 against 0.4 becomes 9/13 = 0.69 against 4/13.
    assert shares(logs(0.6, 0.4), temperature=0.5, top_p=0.65) == [1, 0]
    assert shares(logs(0.6, 0.4), temperature=1.0, top_p=0.65) == [0.6, 0.4]


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    assert choose(torch.tensor([3.0, 2.0]), Draw(SamplingParams(repeat_penalty=2.0), history=[0])) == 1
    assert choose(torch.tensor([-1.0, -1.5]), Draw(SamplingParams(repeat_penalty=2.0), history=[0])) == 1
    assert choose(torch.tensor([-1.0, -2.5]), Draw(SamplingParams(repeat_penalty=2.0), history=[0])) == 0


def test_the_presence_penalty_counts_a_token_once_and_the_frequency_penalty_each_time():
    once = Draw(SamplingParams(presence_penalty=0.6), history=[0, 0, 0])
    each = Draw(SamplingParams(frequency_penalty=0.6), history=[0, 0, 0])
    assert choose(torch.tensor([2.0, 1.0]), once) == 0
    assert choose(torch.tensor([2.0, 1.0]), each) == 1


def test_penalties_change_the_distribution_before_temperature():
    halved = shares(torch.tensor([0.0, 0.0]), presence_penalty=math.log(2) / 2, temperature=0.5, history=[0])
    assert halved == [pytest.approx(1 / 3, abs=1e-3), pytest.approx(2 / 3, abs=1e-3)]


def test_penalties_alone_leave_logits_as_they_are_without_a_history():
    assert choose(torch.tensor([3.0, 2.0]), Draw(SamplingParams(repeat_penalty=2.0, presence_penalty=2.0))) == 0


def test_a_token_of_the_history_beyond_the_vocabulary_is_passed_over():
    assert choose(torch.tensor([3.0, 2.0]), Draw(SamplingParams(repeat_penalty=2.0), history=[7, 0])) == 1


def test_a_mask_leaves_the_other_tokens_no_share():
    vocabulary = logs(*[0.05] * 20)
    assert shares(vocabulary, allowed=bits([3, 17], 20)) == [0.5 if each in (3, 17) else 0 for each in range(20)]


def test_a_mask_comes_before_the_limits():
    assert shares(logs(0.7, 0.2, 0.1), allowed=bits([1, 2], 3), top_k=1) == [0, 1, 0]


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest():
    assert choose(torch.arange(20.0), Draw(SamplingParams(), allowed=b"\xff")) == 7


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution():
    draw = Draw(
        SamplingParams(temperature=2.0, top_k=1, logprobs=2, presence_penalty=2.0), history=[2], allowed=bits([0, 2], 3)
    )
    result = sample([logs(0.1, 0.6, 0.3)], [draw])[0]
    assert result.token_id == 0
    assert result.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [each.token_id for each in result.top] == [1, 2]
    assert [each.logprob for each in result.top] == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-6)


def test_the_largest_logprobs_name_the_lowest_ids_first_where_equal():
    result = sample([torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)], [Draw(SamplingParams(logprobs=3))])[0]
    assert [each.token_id for each in result.top] == [1, 2, 3]


def test_there_are_logprobs_only_if_asked_for():
    none, zero = sample([logs(0.2, 0.8)] * 2, [Draw(SamplingParams()), Draw(SamplingParams(logprobs=0))])
    assert none.logprob is None and none.top == ()
    assert zero.logprob == pytest.approx(math.log(0.8)) and zero.top == ()


def test_more_logprobs_than_tokens_are_all_tokens():
    assert len(sample([logs(0.2, 0.8)], [Draw(SamplingParams(logprobs=20))])[0].top) == 2


# Failures


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=1)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_logit_is_an_engine_error_wherever_it_is(params: SamplingParams, broken: float):
    with pytest.raises(EngineError, match="not a finite number"):
        sample([torch.tensor([5.0, 1.0]), torch.tensor([5.0, broken])], [Draw(params), Draw(params)])


def test_logits_that_leave_no_token_are_an_engine_error():
    with pytest.raises(EngineError, match="not a finite number"):
        choose(torch.tensor([-math.inf, -math.inf]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_forbids_everything_is_an_engine_error(temperature: float):
    with pytest.raises(EngineError, match="forbids all"):
        choose(torch.tensor([1.0, 2.0]), Draw(SamplingParams(temperature=temperature, top_k=2), allowed=b"\0"))


# Batches


def test_no_draws_are_no_tokens():
    assert sample([], []) == []


def test_rows_of_different_kinds_come_back_in_their_order():
    rows = [torch.tensor([0.0, 9.0, 1.0]), torch.tensor([9.0, 0.0]), torch.tensor([0.0, 1.0, 9.0], dtype=torch.float16)]
    draws = [Draw(SamplingParams()), Draw(SamplingParams(temperature=1.0)), Draw(SamplingParams())]
    assert [each.token_id for each in sample(rows, draws)] == [1, 0, 2]


def test_sampling_leaves_the_logits_as_they_are():
    row = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, repeat_penalty=2.0, top_k=1)
    sample([row], [Draw(params, history=[2], allowed=bits([0], 3))])
    assert row.tolist() == [1.0, 2.0, 3.0]


# Against the reference

LOGITS = st.one_of(st.floats(-20, 20, allow_subnormal=False), st.integers(-8, 8).map(lambda n: n / 2), st.just(-math.inf))


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.integers(0, 12)),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        repeat_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 3.0))),
        presence_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        frequency_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 5))),
    )


@st.composite
def cases(draw: st.DrawFn, vocab_size: int) -> tuple[torch.Tensor, Draw]:
    """A row of logits and a draw whose result no rounding decides; at least one token is possible."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    row = torch.tensor(draw(st.lists(LOGITS, min_size=vocab_size, max_size=vocab_size)), dtype=dtype)
    allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, vocab_size - 1), min_size=1)))
    wanted = Draw(
        draw(sampling_params()),
        uniform=draw(st.floats(0, 1, exclude_max=True)),
        history=draw(st.lists(st.integers(0, vocab_size - 1), max_size=8)),
        allowed=None if allowed is None else bits(allowed, vocab_size),
    )
    possible = reference.mask(row.tolist(), wanted.allowed)
    assume(max(possible) > -math.inf)
    assume(not reference.is_near_border(row.tolist(), wanted))
    assume(not _is_tied_by_rounding(reference.penalise(row.tolist(), wanted)))
    return row, wanted


def _is_tied_by_rounding(scores: list[float]) -> bool:
    """Whether two scores differ by so little that a penalty computed in another order could make them equal."""
    ordered = sorted(scores)
    return any(0 < high - low < 1e-9 for low, high in pairwise(ordered))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 20).flatmap(lambda vocab_size: st.lists(cases(vocab_size), min_size=1, max_size=4)))
def test_each_row_of_a_batch_is_sampled_as_the_reference_defines(batch: list[tuple[torch.Tensor, Draw]]):
    results = sample([row for row, _ in batch], [draw for _, draw in batch])

    for (row, draw), result in zip(batch, results, strict=True):
        expected = reference.sample(row.tolist(), draw)
        assert result.token_id == expected.token_id
        assert [each.token_id for each in result.top] == [each.token_id for each in expected.top]
        if expected.logprob is not None:
            assert result.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [each.logprob for each in result.top] == pytest.approx([each.logprob for each in expected.top], abs=1e-4)


@pytest.mark.parametrize(
    "params", [{"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 1500, "top_p": 0.99}, {"top_k": 40}, {"min_p": 0.05}]
)
def test_a_vocabulary_larger_than_the_candidates_is_sampled_as_the_reference_defines(params: dict[str, float]):
    row = torch.randn(3000, generator=torch.Generator().manual_seed(5)).mul(2).to(torch.bfloat16)
    assert len(row) > sampling._NUM_CANDIDATES
    wanted = SamplingParams(temperature=1.5, **params)
    draws = [Draw(wanted, uniform=(index + 0.5) / 40) for index in range(40)]
    draws = [
        replace(draw, uniform=draw.uniform + 1e-5) if reference.is_near_border(row.tolist(), draw) else draw
        for draw in draws
    ]

    chosen = [each.token_id for each in sample([row] * len(draws), draws)]

    assert chosen == [reference.sample(row.tolist(), draw).token_id for draw in draws]


@settings(max_examples=50, deadline=None)
@given(st.lists(LOGITS, min_size=2, max_size=20), st.sampled_from([0.0, 1.0 - 2**-53]))
def test_the_ends_of_the_unit_interval_never_draw_a_token_without_probability(values: list[float], uniform: float):
    assume(max(values) > -math.inf)
    row = torch.tensor(values)
    draw = Draw(SamplingParams(temperature=1.0, top_k=3, top_p=0.9), uniform=uniform)
    assert reference.probabilities(row.tolist(), draw)[choose(row, draw)] > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_chooses_what_the_cpu_chooses():
    rows = list(torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)).mul(3).to(torch.bfloat16))
    limits = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "repeat_penalty": 1.3},
        {"logprobs": 3},
    ]
    draws = [
        Draw(
            SamplingParams(temperature=(index % 3) / 2, **limits[index % len(limits)]),
            uniform=(index + 0.5) / len(rows),
            history=range(index * 10, index * 20),
            allowed=b"\x5a" * 625 if index % 2 else None,
        )
        for index in range(len(rows))
    ]

    on_cpu, on_gpu = sample(rows, draws), sample([row.cuda() for row in rows], draws)

    assert [each.token_id for each in on_gpu] == [each.token_id for each in on_cpu]
    assert [[other.token_id for other in each.top] for each in on_gpu] == [
        [other.token_id for other in each.top] for each in on_cpu
    ]
