"""Answers that repeat themselves: a model that has fallen into a loop does not end its answer.

An answer is in a loop if its last tokens are one cycle, repeated exactly and without a break: a cycle of at most
`MAX_CYCLE` tokens, at least `MIN_REPEATS` times, and at least `MIN_TOKENS` tokens in all. The numbers come from 13 prompts
to the default model, greedy and without a penalty. Answers that got stuck repeated 2 to 68 tokens (a word, a line, a verse)
until they were stopped; in the others (tables, lists, counting) no exact repetition was longer than 58 tokens. Repetition
that was asked for looks the same: a list of 80 zeros stays whole, and one of 300 does not. A token costs O(1): the end is
checked once in `CHECK_EVERY` tokens, and nothing before the last 2,048 tokens is read.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_CYCLE = 128
MIN_REPEATS = 16
MIN_TOKENS = 256
CHECK_EVERY = 32
_PROBE = 8  # tokens that are compared first: other text rarely gets further


def find_cycle(ids: Sequence[int]) -> int:
    """The length of the shortest cycle that the end of an answer repeats; 0 if there is none, or it is not checked now."""
    if len(ids) % CHECK_EVERY or len(ids) < MIN_TOKENS:
        return 0
    end = len(ids)
    probe = ids[end - _PROBE :]
    for cycle in range(1, MAX_CYCLE + 1):
        if ids[-1 - cycle] == ids[-1] and ids[end - _PROBE - cycle : end - cycle] == probe and _repeats(ids, cycle):
            return cycle
    return 0


def _repeats(ids: Sequence[int], cycle: int) -> bool:
    """Whether the last tokens repeat this cycle: they equal those one cycle before."""
    start = len(ids) - max(MIN_TOKENS, MIN_REPEATS * cycle)
    return start >= 0 and ids[start:-cycle] == ids[start + cycle :]
