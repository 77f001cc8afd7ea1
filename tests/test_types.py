"""Counts of tokens: after any tokens and with any window, what counting from scratch gives. Values that are refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import RequestError
from bough.types import SamplingParams, TokenCounts

TOKENS = st.lists(st.integers(0, 5), max_size=20)


def count(tokens: list[int], last_n: int) -> dict[int, int]:
    """By the definition."""
    return dict(Counter(tokens if last_n == -1 else tokens[len(tokens) - min(last_n, len(tokens)) :]))


def read(counts: TokenCounts) -> dict[int, int]:
    assert len(set(counts.ids)) == len(counts.ids)
    return dict(zip(counts.ids, counts.counts, strict=True))


@given(TOKENS, TOKENS, st.integers(-1, 25))
def test_any_tokens_are_counted_as_from_scratch(prompt: list[int], answer: list[int], last_n: int):
    counts = TokenCounts(prompt, last_n)
    assert read(counts) == count(prompt, last_n)

    for end, token_id in enumerate(answer, start=1):
        counts.add(token_id)
        assert read(counts) == count([*prompt, *answer[:end]], last_n)


def test_the_counts_of_a_short_window_do_not_grow_with_the_sequence():
    counts = TokenCounts(last_n=8)

    for token_id in range(1000):
        counts.add(token_id)

    assert sorted(counts.ids) == list(range(992, 1000))


def test_counts_cannot_change_while_somebody_reads_their_memory():
    counts = TokenCounts([1])

    with memoryview(counts.ids), pytest.raises(BufferError):
        counts.add(2)


def test_biases_are_kept_in_the_order_of_ids_whether_they_come_as_a_mapping_or_as_pairs():
    expected = ((3, -100.0), (8, 2.5))

    assert SamplingParams(logit_bias={8: 2.5, 3: -100}).logit_bias == expected
    assert SamplingParams(logit_bias=[(8, 2.5), (3, -100)]).logit_bias == expected
    assert SamplingParams(logit_bias=None).logit_bias == ()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({-1: 1}, "-1"),
        ({"5": 1}, "'5'"),
        ({True: 1}, "True"),
        ({5: 101}, r"logit_bias\[5\] is 101"),
        ({5: float("nan")}, r"logit_bias\[5\] is nan"),
        ({5: "x"}, r"logit_bias\[5\] is 'x'"),
        (5, "logit_bias is 5"),
        ([1, 2], "logit_bias is"),
    ],
)
def test_a_wrong_bias_is_refused_by_what_is_wrong_with_it(given: object, named: str):
    with pytest.raises(RequestError, match=named):
        SamplingParams(logit_bias=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["temperature", "repeat_penalty"])
@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan")])
def test_a_number_that_no_float_holds_is_refused(name: str, value: float):
    with pytest.raises(RequestError, match=f"{name} is .*finite"):
        SamplingParams(**{name: value})
