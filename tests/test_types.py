"""Counts of tokens: after any tokens and with any window, what counting from scratch gives."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.types import TokenCounts

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
