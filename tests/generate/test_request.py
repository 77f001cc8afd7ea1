"""Randomness by position."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from bough.generate.request import SEED_BITS, Request, Uniforms, choose_seed
from bough.models.prompts import EncodedPrompt
from bough.tokens import Tokens
from bough.types import SamplingParams

INTEGERS = st.integers(-(2**70), 2**70)


def uniform(seed: int, choice: int, index: int) -> float:
    return Uniforms(seed, choice).at(index)


@given(INTEGERS, INTEGERS, INTEGERS)
def test_a_number_is_in_the_unit_interval_and_always_the_same(seed: int, choice: int, index: int):
    number = uniform(seed, choice, index)

    assert 0 <= number < 1
    assert uniform(seed, choice, index) == number


def test_the_numbers_never_change_between_versions():
    """Someone's seed gives the same text tomorrow: these values are part of the contract."""
    assert [uniform(42, 0, index) for index in range(3)] == [0.2617177287510618, 0.514786947585882, 0.8857243442347416]


def test_seed_choice_and_index_each_change_the_number():
    numbers = {uniform(seed, choice, index) for seed in range(10) for choice in range(10) for index in range(10)}
    assert len(numbers) == 1000


def test_numbers_written_side_by_side_do_not_run_together():
    assert uniform(1, 11, 1) != uniform(11, 1, 1)
    assert uniform(1, 1, 11) != uniform(1, 11, 1)


def test_the_numbers_fill_the_interval_evenly():
    tenths = [0] * 10
    for index in range(10_000):
        tenths[int(uniform(7, 0, index) * 10)] += 1
    assert min(tenths) > 900 and max(tenths) < 1100


def test_a_seed_that_was_asked_for_is_kept_even_if_it_is_zero():
    assert choose_seed(0, random_bits=lambda bits: 99) == 0


def test_without_a_seed_the_source_gives_one_of_a_size_that_json_can_carry():
    assert choose_seed(None, random_bits=lambda bits: (1 << bits) - 1) == 2**53 - 1
    assert SEED_BITS == 53


def test_a_request_crosses_to_another_machine_whole_and_its_ids_once() -> None:
    prompt = EncodedPrompt(Tokens.of(range(1000)), is_chat=True)
    request = Request.of(prompt, SamplingParams(temperature=1.0), salt="mine", resumed_ids=(5, 6))

    sent = pickle.dumps(request)
    received = pickle.loads(sent)

    assert received == request and received.seed == request.seed
    assert received.known.ids == [*range(1000), 5, 6]
    assert len(sent) < 2 * len(prompt.tokens.key)
