"""The drawing of the tree fits the width that it is given."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.cache.admin.node_view import LEAST_WIDTH, NodeView, columns, draw, shorten
from bough.tokens import pack

COUNT = re.compile(r"\d+ tokens")


def make_node(text: str, start: int, num_tokens: int, points: tuple[int, ...], depth: int, **changes: object) -> NodeView:
    facts = {"nbytes": 7 * 2**20, "num_pages": 3, "tiers": {"host": 2, "disk": 120}, "kept": points[:1]}
    facts |= {"is_in_use": True, "hits": 12, "idle_s": 1.0, "edge": pack([1]), "decode": lambda ids: text} | changes
    return NodeView(start=start, end=start + num_tokens, points=points, depth=depth, **facts)  # type: ignore[arg-type]


texts = st.text(alphabet=st.sampled_from("ab 漢字e\u0301\n\té🙂"), max_size=200)
points = st.lists(st.integers(0, 2**20), max_size=30).map(tuple)


@settings(max_examples=150, deadline=None)
@given(width=st.integers(LEAST_WIDTH, 200), chain=st.lists(st.tuples(texts, points), min_size=1, max_size=40))
def test_no_line_is_wider_than_it_may_be_and_no_count_is_broken(
    width: int, chain: list[tuple[str, tuple[int, ...]]]
) -> None:
    nodes: list[NodeView] = []
    below = nodes
    for depth, (text, offsets) in enumerate(chain):
        below += [make_node(text, 1000 * depth, 1000, offsets, depth) for _ in range(1 + depth % 2)]
        below = below[0].children

    lines = draw({"": nodes, "漢" * 300: []}, width).splitlines()

    assert max(map(columns, lines)) <= width
    assert sum(len(COUNT.findall(line)) for line in lines) == len(chain) + len(chain) // 2


def test_without_a_width_a_node_is_one_line_with_a_short_text() -> None:
    node = make_node("x" * 100, 0, 256, tuple(range(50)), 0, tiers={"device": 1}, is_in_use=False)

    (_, line) = draw({"": [node]}).splitlines()

    assert line.startswith(
        f'└─ [0, 256) "{"x" * 23} … {"x" * 22}"  256 tokens · 7.0 MiB · 12 uses · restore points 0, 1, 2'
    )


def test_where_the_counts_leave_no_room_for_the_text_they_follow_below_it() -> None:
    child = make_node("and so on", 256, 9, (), 1, tiers={"disk": 1})
    parent = make_node("once upon a time there was a text", 0, 256, (3, 5), 0, tiers={"disk": 1}, children=[child])

    assert draw({"": [parent]}, 60).splitlines() == [
        "root",
        '└─ [0, 256) "once upon a time there was a text"',
        "   │  256 tokens · 7.0 MiB · 1 on disk · 12 uses",
        "   │  2 restore points · 1 kept · in use",
        '   └─ [256, 265) "and so on"',
        "         9 tokens · 7.0 MiB · 1 on disk · 12 uses · in use",
    ]


def test_a_deep_tree_tells_its_depth_instead_of_all_its_levels() -> None:
    nodes: list[NodeView] = []
    below = nodes
    for depth in range(100):
        below.append(make_node("word", depth, 1, (), depth))
        below = below[0].children

    assert draw({"": nodes}, 60).splitlines()[-3:] == [
        '99┆               └─ [99, 100) "word"',
        "99┆                     1 tokens · 7.0 MiB · 2 on host",
        "99┆                     120 on disk · 12 uses · in use",
    ]


def test_an_edge_without_text_has_no_quotes() -> None:
    assert draw({"": [make_node("", 0, 5, (), 0)]}, 80).splitlines()[1].startswith("└─ [0, 5)  5 tokens")


@pytest.mark.parametrize(("most", "found"), [(0, ""), (3, "abc"), (4, "a … "), (9, "abc … xyz"), (10, "abcdevwxyz")])
def test_a_short_text_has_a_beginning_and_an_end(most: int, found: str) -> None:
    assert shorten("abcdevwxyz", most) == found
