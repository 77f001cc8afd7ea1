"""What every sampler does alike: distributions computed by hand, ties, log-probabilities, failures and batches."""

from __future__ import annotations

import math

import pytest
import torch

from bough.errors import EngineError
from bough.types import Draw, SamplingParams, TokenCounts
from tests.sampling.draws import bits, logs
from tests.sampling.samplers import MLX, PRECISE_TORCH, TORCH, Sampler


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=[TORCH, PRECISE_TORCH, MLX], ids=lambda sampler: sampler.name)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return request.param


# Greedy


def test_greedy_takes_the_largest_logit(sampler: Sampler):
    assert sampler.choose([0.5, 3.0, -1.0]) == 1


def test_greedy_takes_the_lowest_id_of_equal_logits(sampler: Sampler):
    assert sampler.choose([0.0, 2.0, 2.0, 2.0]) == 1
    assert sampler.choose([0.0, 2.0, 2.0, 2.0], Draw(SamplingParams(), allowed=bits([0, 2, 3], 4))) == 2


def test_greedy_takes_no_notice_of_the_number_drawn(sampler: Sampler):
    chosen = [sampler.choose([1.0, 1.1], Draw(SamplingParams(), uniform=each)) for each in (0.0, 0.999)]
    assert chosen == [1, 1]


# Biases


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(sampler: Sampler):
    assert sampler.choose([5.0, 3.0, 1.0], logit_bias={2: 100}) == 2
    assert sampler.choose([5.0, 3.0, 1.0], logit_bias={0: -100}) == 1
    assert sampler.shares(logs(0.5, 0.3, 0.2), logit_bias={0: -100}) == [0, pytest.approx(0.6), pytest.approx(0.4)]


def test_a_bias_is_added_before_the_penalties(sampler: Sampler):
    draw = Draw(SamplingParams(logit_bias={0: 3}, repeat_penalty=2.0), seen=TokenCounts([0]))
    assert sampler.choose([1.0, 2.5], draw) == 1  # (1 + 3) / 2 and not 1 / 2 + 3


def test_a_grammar_wins_against_a_bias(sampler: Sampler):
    draw = Draw(SamplingParams(logit_bias={0: 100, 1: -100}), allowed=bits([1, 2], 3))
    assert sampler.choose([5.0, 3.0, 1.0], draw) == 2


def test_a_bias_leaves_the_log_probabilities_and_the_other_rows_as_they_are(sampler: Sampler):
    row = sampler.row(logs(0.7, 0.2, 0.1))
    plain, biased = SamplingParams(logprobs=1), SamplingParams(logprobs=1, logit_bias={2: 100})

    first, second, third = sampler.sample([row, row, row], [Draw(plain), Draw(biased), Draw(plain)])

    assert (first.token_id, second.token_id, third.token_id) == (0, 2, 0)
    assert second.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert second.top == first.top == third.top


def test_a_bias_beyond_the_vocabulary_changes_nothing(sampler: Sampler):
    assert sampler.choose([5.0, 3.0], logit_bias={2: 100, 10**6: 100}) == 0


# Distributions computed by hand


def test_a_draw_follows_the_softmax_in_the_order_of_token_ids(sampler: Sampler):
    logits = logs(0.2, 0.5, 0.3)
    chosen = [
        sampler.choose(logits, Draw(SamplingParams(temperature=1.0), uniform=each))
        for each in (0, 0.19, 0.21, 0.69, 0.71, 0.99)
    ]
    assert chosen == [0, 0, 1, 1, 2, 2]


def test_temperature_divides_the_logits(sampler: Sampler):
    assert sampler.shares(logs(0.2, 0.8), temperature=0.5) == [
        pytest.approx(0.04 / 0.68, abs=1e-3),
        pytest.approx(0.64 / 0.68, abs=1e-3),
    ]


def test_a_temperature_near_zero_is_greedy(sampler: Sampler):
    assert sampler.shares(logs(0.3, 0.4, 0.3), temperature=1e-300) == [0, 1, 0]


def test_top_k_keeps_the_k_likeliest(sampler: Sampler):
    assert sampler.shares(logs(0.1, 0.4, 0.2, 0.3), top_k=2) == [
        0,
        pytest.approx(4 / 7, abs=1e-3),
        0,
        pytest.approx(3 / 7, abs=1e-3),
    ]


def test_top_k_keeps_the_lowest_ids_of_equal_tokens(sampler: Sampler):
    assert sampler.shares(logs(0.1, 0.3, 0.3, 0.3), top_k=2) == [0, 0.5, 0.5, 0]


def test_top_k_beyond_the_vocabulary_keeps_everything(sampler: Sampler):
    assert sampler.shares(logs(0.25, 0.75), top_k=1000) == [0.25, 0.75]


def test_top_p_keeps_the_smallest_set_with_that_mass(sampler: Sampler):
    assert sampler.shares(logs(0.1, 0.4, 0.2, 0.3), top_p=0.69) == [
        0,
        pytest.approx(4 / 7, abs=1e-3),
        0,
        pytest.approx(3 / 7, abs=1e-3),
    ]
    assert sampler.shares(logs(0.1, 0.4, 0.2, 0.3), top_p=0.71) == [
        0,
        pytest.approx(4 / 9, abs=1e-3),
        pytest.approx(2 / 9, abs=1e-3),
        pytest.approx(3 / 9, abs=1e-3),
    ]


def test_top_p_keeps_at_least_one_token(sampler: Sampler):
    assert sampler.shares(logs(0.3, 0.4, 0.3), top_p=1e-9) == [0, 1, 0]


def test_top_p_counts_the_mass_that_top_k_left(sampler: Sampler):
    # Of 0.4 + 0.3 the first has 4/7 = 0.571, which is enough for 0.57 though it is less than 0.57 of the whole.
    assert sampler.shares(logs(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=0.57) == [0, 1, 0, 0]


def test_min_p_keeps_what_has_that_share_of_the_likeliest(sampler: Sampler):
    assert sampler.shares(logs(0.1, 0.4, 0.19, 0.31), min_p=0.5) == [
        0,
        pytest.approx(40 / 71, abs=1e-3),
        0,
        pytest.approx(31 / 71, abs=1e-3),
    ]


def test_min_p_of_one_keeps_the_likeliest(sampler: Sampler):
    assert sampler.shares(logs(0.1, 0.5, 0.4), min_p=1.0) == [0, 1, 0]


def test_min_p_keeps_all_that_are_as_likely_as_the_likeliest(sampler: Sampler):
    assert sampler.shares([0.0, 2.0, 2.0], min_p=1.0) == [0, 0.5, 0.5]


def test_top_n_sigma_keeps_what_is_within_n_standard_deviations_of_the_largest(sampler: Sampler):
    logits = [0.0, 2.0, 2.5, 3.5]  # their mean is 2 and their standard deviation 1.275
    assert sampler.shares(logits, top_n_sigma=0.5) == [0, 0, 0, 1]
    assert [share > 0 for share in sampler.shares(logits, top_n_sigma=1)] == [False, False, True, True]
    assert [share > 0 for share in sampler.shares(logits, top_n_sigma=3)] == [True, True, True, True]


def test_top_n_sigma_keeps_the_same_tokens_at_any_temperature(sampler: Sampler):
    assert sampler.shares([0.0, 2.0, 2.5, 3.5], top_n_sigma=1, temperature=1000) == [0, 0, 0.5, 0.5]


def test_top_n_sigma_leaves_out_what_a_mask_forbids(sampler: Sampler):
    # Of 2.0 and 2.5 the standard deviation is 0.25; of all four it is 1.275, and both would stay.
    assert sampler.shares([0.0, 2.0, 2.5, 3.5], top_n_sigma=1.9, allowed=bits([1, 2], 4)) == [0, 0, 1, 0]


def test_top_n_sigma_of_equal_logits_keeps_all(sampler: Sampler):
    assert sampler.shares([1.0, 1.0], top_n_sigma=1) == [0.5, 0.5]


def test_limits_look_at_the_distribution_after_temperature(sampler: Sampler):
    # Squared, 0.6 against 0.4 becomes 9/13 = 0.69 against 4/13.
    assert sampler.shares(logs(0.6, 0.4), temperature=0.5, top_p=0.65) == [1, 0]
    assert sampler.shares(logs(0.6, 0.4), temperature=1.0, top_p=0.65) == [0.6, 0.4]


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits(sampler: Sampler):
    assert sampler.choose([3.0, 2.0], Draw(SamplingParams(repeat_penalty=2.0), seen=TokenCounts([0]))) == 1
    assert sampler.choose([-1.0, -1.5], Draw(SamplingParams(repeat_penalty=2.0), seen=TokenCounts([0]))) == 1
    assert sampler.choose([-1.0, -2.5], Draw(SamplingParams(repeat_penalty=2.0), seen=TokenCounts([0]))) == 0


def test_the_presence_penalty_counts_a_token_once_and_the_frequency_penalty_each_time(sampler: Sampler):
    once = Draw(SamplingParams(presence_penalty=0.6), seen=TokenCounts([0, 0, 0]))
    each = Draw(SamplingParams(frequency_penalty=0.6), seen=TokenCounts([0, 0, 0]))
    assert sampler.choose([2.0, 1.0], once) == 0
    assert sampler.choose([2.0, 1.0], each) == 1


def test_penalties_change_the_distribution_before_temperature(sampler: Sampler):
    halved = sampler.shares([0.0, 0.0], presence_penalty=math.log(2) / 2, temperature=0.5, seen=TokenCounts([0]))
    assert halved == [pytest.approx(1 / 3, abs=1e-3), pytest.approx(2 / 3, abs=1e-3)]


def test_penalties_alone_leave_logits_as_they_are_if_no_token_was_seen(sampler: Sampler):
    assert sampler.choose([3.0, 2.0], Draw(SamplingParams(repeat_penalty=2.0, presence_penalty=2.0))) == 0


def test_a_seen_token_beyond_the_vocabulary_is_passed_over(sampler: Sampler):
    assert sampler.choose([3.0, 2.0], Draw(SamplingParams(repeat_penalty=2.0), seen=TokenCounts([7, 0, -1]))) == 1


def test_a_sampler_keeps_no_view_of_the_counts_even_if_it_fails(sampler: Sampler):
    seen = TokenCounts([0])
    draw = Draw(SamplingParams(repeat_penalty=2.0), seen=seen)

    with pytest.raises(EngineError) as caught:
        sampler.choose([math.nan, 2.0], draw)
    seen.add(1)

    assert caught.value.__traceback__ is not None  # it would keep a view alive
    assert sampler.choose([3.0, 2.9], draw) == 0


def test_a_penalty_beyond_all_numbers_leaves_a_token_no_chance(sampler: Sampler):
    draw = Draw(SamplingParams(temperature=1.0, repeat_penalty=1e300), seen=TokenCounts([0]))
    assert sampler.choose([-1e30, -2e30], draw) == 1


def test_a_mask_leaves_the_other_tokens_no_share(sampler: Sampler):
    vocabulary = logs(*[0.05] * 20)
    assert sampler.shares(vocabulary, allowed=bits([3, 17], 20)) == [0.5 if each in (3, 17) else 0 for each in range(20)]


def test_a_mask_comes_before_the_limits(sampler: Sampler):
    assert sampler.shares(logs(0.7, 0.2, 0.1), allowed=bits([1, 2], 3), top_k=1) == [0, 1, 0]


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest(sampler: Sampler):
    assert sampler.choose(range(20), Draw(SamplingParams(), allowed=b"\xff")) == 7


def test_a_mask_longer_than_the_vocabulary_allows_no_other_tokens(sampler: Sampler):
    assert sampler.choose(range(5), Draw(SamplingParams(), allowed=b"\xff\xff")) == 4


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution(sampler: Sampler):
    draw = Draw(
        SamplingParams(temperature=2.0, top_k=1, logprobs=2, presence_penalty=2.0),
        seen=TokenCounts([2]),
        allowed=bits([0, 2], 3),
    )
    result = sampler.sample([sampler.row(logs(0.1, 0.6, 0.3))], [draw])[0]
    assert result.token_id == 0
    assert result.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [each.token_id for each in result.top] == [1, 2]
    assert [each.logprob for each in result.top] == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-6)


def test_the_largest_logprobs_name_the_lowest_ids_first_where_equal(sampler: Sampler):
    result = sampler.sample([sampler.row([0.0, 1.0, 1.0, 1.0, 1.0], "bfloat16")], [Draw(SamplingParams(logprobs=3))])[0]
    assert [each.token_id for each in result.top] == [1, 2, 3]


def test_there_are_logprobs_only_if_asked_for(sampler: Sampler):
    none, zero = sampler.sample(
        [sampler.row(logs(0.2, 0.8))] * 2, [Draw(SamplingParams()), Draw(SamplingParams(logprobs=0))]
    )
    assert none.logprob is None and none.top == ()
    assert zero.logprob == pytest.approx(math.log(0.8)) and zero.top == ()


def test_more_logprobs_than_tokens_are_all_tokens(sampler: Sampler):
    assert len(sampler.sample([sampler.row(logs(0.2, 0.8))], [Draw(SamplingParams(logprobs=20))])[0].top) == 2


# Failures


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=1)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_logit_is_an_engine_error_wherever_it_is(sampler: Sampler, params: SamplingParams, broken: float):
    with pytest.raises(EngineError, match="not a finite number"):
        sampler.sample([sampler.row([5.0, 1.0]), sampler.row([5.0, broken])], [Draw(params), Draw(params)])


def test_logits_that_leave_no_token_are_an_engine_error(sampler: Sampler):
    with pytest.raises(EngineError, match="not a finite number"):
        sampler.choose([-math.inf, -math.inf])


@pytest.mark.parametrize("mask", [b"\0", b""])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_forbids_everything_is_an_engine_error(sampler: Sampler, temperature: float, mask: bytes):
    with pytest.raises(EngineError, match="forbids all"):
        sampler.choose(range(2000), Draw(SamplingParams(temperature=temperature, top_k=2), allowed=mask))


def test_a_mask_that_allows_only_impossible_tokens_is_an_engine_error(sampler: Sampler):
    with pytest.raises(EngineError, match="forbids all"):
        sampler.choose([1.0, -math.inf], Draw(SamplingParams(temperature=1.0), allowed=bits([1], 2)))


# Batches


def test_no_draws_are_no_tokens(sampler: Sampler):
    assert sampler.sample([], []) == []


def test_rows_of_different_kinds_come_back_in_their_order(sampler: Sampler):
    rows = [sampler.row([0.0, 9.0, 1.0]), sampler.row([9.0, 0.0]), sampler.row([0.0, 1.0, 9.0], "float16")]
    draws = [Draw(SamplingParams()), Draw(SamplingParams(temperature=1.0)), Draw(SamplingParams())]
    assert [each.token_id for each in sampler.sample(rows, draws)] == [1, 0, 2]


def test_sampling_leaves_the_logits_as_they_are(sampler: Sampler):
    row = sampler.row([1.0, 2.0, 3.0])
    params = SamplingParams(temperature=1.0, repeat_penalty=2.0, top_k=1)
    sampler.sample([row], [Draw(params, seen=TokenCounts([2]), allowed=bits([0], 3))])
    assert row.tolist() == [1.0, 2.0, 3.0]
