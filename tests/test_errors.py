"""Every error can go from one process to another."""

from __future__ import annotations

import pickle

import pytest

from bough.errors import BoughError, DoesNotFit, PromptTooLong, QueueFull, RateLimited, TooLarge


@pytest.mark.parametrize(
    "error", [PromptTooLong(9, 8, is_least=True), DoesNotFit(3, 2, 1), QueueFull(4), TooLarge(2, 1), RateLimited("no", 2.5)]
)
def test_an_error_is_the_same_after_it_was_pickled(error: BoughError) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
