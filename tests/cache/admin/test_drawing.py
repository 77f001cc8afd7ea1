"""The drawing of the tree fits the width that it is given."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.cache.admin.drawing import LEAST_WIDTH, columns, draw, shorten
from bough.cache.admin.node_view import NodeView
from bough.tokens import pack

COUNT = re.compile(r"\d tokens")


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

    assert line == (
        f'└─ [0, 256) "{"x" * 23} … {"x" * 22}"  256 tokens · 7.3 MB · used 12 times · 50 restore points · kept to 0'
    )


def test_where_the_counts_leave_no_room_for_the_text_they_follow_below_it() -> None:
    child = make_node("and so on", 256, 9, (), 1, tiers={"disk": 1})
    parent = make_node("once upon a time there was a text", 0, 256, (3, 5), 0, tiers={"disk": 1}, children=[child])

    assert draw({"": [parent]}, 60).splitlines() == [
        "root",
        '└─ [0, 256) "once upon a time there was a text"',
        "   │  256 tokens · 7.3 MB · on disk · used 12 times",
        "   │  2 restore points · kept to 3 · in use",
        '   └─ [256, 265) "and so on"',
        "         9 tokens · 7.3 MB · on disk · used 12 times",
        "         in use",
    ]


def test_a_deep_tree_tells_its_depth_instead_of_all_its_levels() -> None:
    nodes: list[NodeView] = []
    below = nodes
    for depth in range(100):
        below.append(make_node("word", 9 * depth, 9, (), depth))
        below = below[0].children

    assert draw({"": nodes}, 60).splitlines()[-3:] == [
        '99┆               └─ [891, 900) "word"',
        "99┆                     9 tokens · 7.3 MB · on host and disk",
        "99┆                     used 12 times · in use",
    ]


def test_an_edge_without_text_has_no_quotes() -> None:
    assert draw({"": [make_node("", 0, 5, (), 0)]}, 80).splitlines()[1].startswith("└─ [0, 5)")


@pytest.mark.parametrize(("most", "found"), [(0, ""), (3, "abc"), (4, "a … "), (9, "abc … xyz"), (10, "abcdevwxyz")])
def test_a_short_text_has_a_beginning_and_an_end(most: int, found: str) -> None:
    assert shorten("abcdevwxyz", most) == found


def chat(text: str, start: int, num_tokens: int, idle_s: float = 0.0, *children: NodeView, **changes: object) -> NodeView:
    """A node of a tree in which nothing is kept or in use."""
    facts = {"tiers": {"device": 1}, "kept": (), "is_in_use": False, "nbytes": 0, "hits": 1}
    return make_node(text, start, num_tokens, (), 0, idle_s=idle_s, children=list(children), **facts | changes)


def test_what_was_used_last_is_drawn_first_and_other_days_are_told() -> None:
    nodes = [chat("old", 0, 9, 3 * 86_400.0, hits=4), chat("new", 0, 7, 60.0), chat("older", 0, 8, 86_400.0)]

    assert draw({"": nodes}).splitlines()[1:] == [
        '├─ [0, 7) "new"  7 tokens · used once',
        '├─ [0, 8) "older"  8 tokens · used once · last 1 day ago',
        '└─ [0, 9) "old"  9 tokens · used 4 times · last 3 days ago',
    ]


def test_short_edges_are_joined_with_what_follows_them() -> None:
    words = {number: f"{number} " for number in range(20)}
    shown = {"decode": lambda ids: "".join(words[each] for each in ids)}
    end = chat("", 8, 2, 1.0, edge=pack([8, 9]), **shown)
    long = chat("", 2, 6, 1.0, end, edge=pack([2, 3, 4, 5, 6, 7]), **shown)
    other = chat("", 2, 5, 2.0, edge=pack([12, 13, 14, 15, 16]), **shown)
    nodes = [chat("", 0, 2, 1.0, other, long, edge=pack([0, 1]), **shown)]

    assert draw({"": nodes}).splitlines() == [
        "root",
        '├─ [0, 10) "0 1 2 3 4 5 6 7 8 9"  10 tokens · used once',
        '└─ [0, 7) "0 1 12 13 14 15 16"  7 tokens · used once',
    ]
    assert len(draw({"": nodes}, min_tokens=0).splitlines()) == 5


def test_short_ends_beside_longer_ones_and_what_is_too_deep_are_counted() -> None:
    deep = chat("deep", 5, 9, 1.0, chat("a", 14, 9), chat("b", 14, 9))
    nodes = [chat("top", 0, 5, 1.0, deep, chat("x", 5, 2), chat("y", 5, 1))]

    assert draw({"": nodes}, depth=2).splitlines() == [
        "root",
        '└─ [0, 5) "top"  5 tokens · used once',
        '   ├─ [5, 14) "deep"  9 tokens · used once',
        "   │  └─ … 2 branches",
        "   └─ … 2 ends of fewer than 4 tokens",
    ]


@pytest.mark.parametrize(
    ("tiers", "place"),
    [
        ({"device": 2}, ""),
        ({"disk": 2}, " · on disk"),
        ({"device": 1, "disk": 2}, " · part on disk"),
        ({"host": 1, "disk": 2}, " · on host and disk"),
    ],
)
def test_it_is_said_in_words_where_content_is(tiers: dict[str, int], place: str) -> None:
    (_, line) = draw({"": [chat("a", 0, 1_234, tiers=tiers)]}).splitlines()

    assert line == f'└─ [0, 1234) "a"  1,234 tokens{place} · used once'
