"""The plan as a pure function of intervals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bough.cache.tree.plan import Interval, LiveRows, deepest
from tests.fakes import full, recurrent, window

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda x: (x[0], x[0] + x[1])), max_size=5)


@given(st.lists(intervals, min_size=1, max_size=4), st.integers(0, 40))
def test_the_deepest_common_offset_is_what_trying_every_offset_finds(reaches: list[list[Interval]], limit: int) -> None:
    def fits(at: int) -> bool:
        return all(any(low <= at <= high for low, high in reach) for reach in reaches)

    assert deepest(reaches, limit) == next((at for at in range(limit, 0, -1) if fits(at)), 0)


def test_a_lane_can_go_back_anywhere_in_full_attention() -> None:
    group = full()
    assert LiveRows(5, 9, {group: 0}).reach(group) == [(0, 5)]


def test_a_lane_can_go_back_in_a_window_only_where_all_rows_are_still_held() -> None:
    group = window(size=4)
    assert LiveRows(9, 9, {group: 3}).reach(group) == [(6, 9)]
    assert LiveRows(9, 9, {group: 0}).reach(group) == [(0, 9)]
    assert LiveRows(5, 9, {group: 3}).reach(group) == []


def test_a_recurrent_lane_stands_only_where_it_is() -> None:
    group = recurrent()
    assert LiveRows(9, 9, {}).reach(group) == [(9, 9)]
    assert LiveRows(8, 9, {}).reach(group) == []
