"""Answers that repeat themselves: a model that has fallen into a loop does not end its answer.

An answer is in a loop if its last tokens are one cycle, repeated exactly and without a break: a cycle of at most
`MAX_CYCLE` tokens, at least `MIN_REPEATS` times, and at least `MIN_TOKENS` tokens in all. So one token must come 256 times,
eight tokens 32 times, and 128 tokens 16 times.

The numbers come from 13 prompts to the default model, greedy and without a penalty. The answers that got stuck repeated
2, 3, 4, 35 or 68 tokens (a word, a line, a verse, a paragraph) until they were stopped. In the others (tables, lists,
counting) no exact repetition was longer than 58 tokens. Repetition that somebody asks for looks the same as a loop: a list
of 80 zeros stays whole, and one of 300 does not.

The last tokens are looked at once in `CHECK_EVERY` tokens. A token costs O(1), however long the answer is: nothing before
the last 2,048 tokens is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_CYCLE = 128
MIN_REPEATS = 16
MIN_TOKENS = 256
CHECK_EVERY = 32
_PROBE = 8  # tokens that are compared first: text that is no loop rarely gets further


def find_cycle(ids: Sequence[int]) -> int:
    """The length of the shortest cycle that the end of an answer repeats; 0 if it is in no loop, or not looked at now."""
    if len(ids) % CHECK_EVERY or len(ids) < MIN_TOKENS:
        return 0
    end = len(ids)
    probe = ids[end - _PROBE :]
    for cycle in range(1, MAX_CYCLE + 1):
        if ids[-1 - cycle] == ids[-1] and ids[end - _PROBE - cycle : end - cycle] == probe and _repeats(ids, cycle):
            return cycle
    return 0


def _repeats(ids: Sequence[int], cycle: int) -> bool:
    """Whether the last tokens are this cycle again and again: they are the same as those one cycle before."""
    start = len(ids) - max(MIN_TOKENS, MIN_REPEATS * cycle)
    return start >= 0 and ids[start:-cycle] == ids[start + cycle :]
