"""Loops: a cycle of any length is found soon after it has come often enough, and nothing else is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.cache.tree.state import Group
from bough.generate.loops import CHECK_EVERY, MAX_CYCLE, MIN_REPEATS, MIN_TOKENS, find_cycle
from tests.generate.test_generation import PROMPT, Bench

TOKENS = st.lists(st.integers(0, 5), max_size=120)


def first_found(ids: list[int]) -> tuple[int, int] | None:
    """After how many tokens of an answer a loop is found, and the length of its cycle."""
    found = ((end, find_cycle(ids[:end])) for end in range(1, len(ids) + 1))
    return next(((end, cycle) for end, cycle in found if cycle), None)


def shortest_period(cycle: list[int]) -> int:
    """By the definition: the shortest part that gives the cycle when it is repeated."""
    lengths = range(1, len(cycle) + 1)
    return next(n for n in lengths if len(cycle) % n == 0 and cycle[:n] * (len(cycle) // n) == cycle)


def is_loop(ids: list[int]) -> bool:
    """By the definition: the last tokens are some cycle, often enough and long enough."""
    for cycle in range(1, MAX_CYCLE + 1):
        size = max(MIN_TOKENS, MIN_REPEATS * cycle)
        if len(ids) >= size and all(ids[i] == ids[i - cycle] for i in range(len(ids) - size + cycle, len(ids))):
            return True
    return False


def repeat(bench: Bench, cycle: list[int]) -> None:
    """Make the model of a bench answer with this cycle for ever."""

    def score(held: dict[Group, tuple[int, list[int]]]) -> tuple[float, ...]:
        first, tokens = next(iter(held.values()))
        wanted = cycle[(first + len(tokens) - len(PROMPT)) % len(cycle)]
        return tuple(float(token == wanted) for token in range(bench.engine.vocab_size))

    bench.engine._logits = score  # type: ignore[method-assign]


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 5), min_size=1, max_size=MAX_CYCLE))
def test_a_cycle_of_any_length_is_found_soon_after_it_was_repeated_often_enough(before: list[int], cycle: list[int]):
    period = shortest_period(cycle)
    needed = max(MIN_TOKENS, MIN_REPEATS * period)
    ids = before + cycle * (1 + (needed + CHECK_EVERY) // len(cycle))

    found = first_found(ids)

    assert found is not None
    assert found[0] <= len(before) + needed + CHECK_EVERY - 1
    assert found[1] == period


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=MAX_CYCLE + 8),
    st.integers(1, 2400),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_what_is_found_is_a_loop_by_the_definition(cycle: list[int], length: int, end: list[int]):
    repeated = (cycle * (1 + length // len(cycle)))[:length]
    ids = [9] * (-(length + len(end)) % CHECK_EVERY) + repeated + end  # a length at which it is looked for

    assert bool(find_cycle(ids)) == is_loop(ids)


def test_text_that_only_looks_repetitive_is_no_loop():
    line = [7, 8, 9, 10, 11]
    counted = [token for number in range(400) for token in (1000 + number, *line)]
    refrain = [token for verse in range(30) for token in (*range(100 * verse, 100 * verse + 30), *line * 6)]
    interrupted = ([5] * (MIN_TOKENS - 1) + [6]) * 4
    too_long_a_cycle = list(range(MAX_CYCLE + 1)) * 40

    assert [first_found(ids) for ids in (counted, refrain, interrupted, too_long_a_cycle)] == [None] * 4


def test_an_answer_that_repeats_itself_ends_and_what_was_computed_is_kept():
    bench = Bench(context_tokens=2000)
    repeat(bench, [3, 1, 4])

    done = bench.run(max_tokens=1500)

    assert (done.finish_reason, done.cycle_tokens) == ("loop", 3)
    assert done.token_ids == ((3, 1, 4) * 500)[: len(done.token_ids)]
    assert MIN_TOKENS <= len(done.token_ids) < MIN_TOKENS + CHECK_EVERY
    assert bench.cache.count_reusable([*PROMPT, *done.token_ids]) >= len(PROMPT) + len(done.token_ids) - 1


def test_the_guard_can_be_turned_off_and_does_nothing_where_the_length_is_wanted():
    bench = Bench(context_tokens=2000)
    repeat(bench, [3, 1, 4])

    for options in ({"loop_guard": False}, {"ignore_eos": True}):
        done = bench.run(max_tokens=600, **options)
        assert (done.finish_reason, len(done.token_ids), done.cycle_tokens) == ("length", 600, 0)
