"""The prefix trie by itself, without pages, and with pages of the fake engine."""

from __future__ import annotations

import random

import pytest

from bough.cache.tree.node import Hold, Reason
from bough.cache.tree.state import Page
from bough.cache.tree.trie import NoMemory, Trie
from bough.tokens import common_prefix, pack, unpack
from tests.fakes import FakeEngine, full, recurrent, window


def test_match_stops_inside_the_edge_where_the_prompt_diverges() -> None:
    trie = Trie(NoMemory())
    chat = trie.append(trie.append(trie.root, [1, 2, 3]), [4, 5, 6])

    found = trie.match([1, 2, 3, 4, 9])

    assert found.length == 4
    assert found.path[-1] is chat
    assert chat.end == 6  # looking does not split


def test_two_branches_match_their_common_part_and_an_unrelated_prompt_nothing() -> None:
    trie = Trie(NoMemory())
    head = trie.append(trie.root, [1, 2, 3])
    trie.append(head, [4, 5])
    trie.append(head, [6, 7])

    assert trie.match([1, 2, 3, 8]).length == 3
    assert trie.match([9, 9]).length == 0
    assert trie.match([9, 9]).node is trie.root


def test_repeated_branching_at_three_then_two() -> None:
    trie = Trie(NoMemory())
    tail = trie.append(trie.root, [1, 2, 3, 4])
    at_three = trie.split(tail, 3)
    trie.append(at_three, [9])
    at_two = trie.split(at_three, 2)
    trie.append(at_two, [8])

    trie.check()
    assert [node.end for node in trie.match([1, 2, 3, 4]).path] == [2, 3, 4]
    assert trie.match([1, 2, 3, 9]).length == 4
    assert trie.match([1, 2, 8]).length == 3


def test_remove_refuses_the_root_and_inner_nodes() -> None:
    trie = Trie(NoMemory())
    head = trie.append(trie.root, [1, 2])
    leaf = trie.append(head, [3])

    for node in (trie.root, head):
        with pytest.raises(ValueError, match="only a leaf"):
            trie.remove(node)
    assert trie.remove(leaf) is head


def test_a_trie_of_100_000_nodes_is_walked_and_checked_without_recursion() -> None:
    trie = Trie(NoMemory())
    node = trie.root
    for token in range(50_000):  # one deep path, with a leaf beside each node
        trie.append(node, [token, 7])
        node = trie.append(node, [token + 1_000_000])
    trie.check()

    assert sum(1 for _ in trie.walk()) == 100_001
    for node in reversed(list(trie.walk())):
        trie.clear_leaf(node)
    assert trie.root.is_leaf


def test_the_common_prefix_is_found_wherever_it_ends() -> None:
    chance = random.Random(1)
    tokens = [chance.randrange(3) for _ in range(200)]
    for _ in range(300):
        start = chance.randrange(200)
        edge = tokens[start : start + chance.randrange(1, 60)]
        if chance.random() < 0.7:
            edge[chance.randrange(len(edge))] += chance.randrange(2)
        plain = next((i for i, (a, b) in enumerate(zip(edge, tokens[start:], strict=False)) if a != b), None)
        expected = min(len(edge), len(tokens) - start) if plain is None else plain
        assert common_prefix(pack(edge), pack(tokens), start) == expected


def test_equal_bytes_across_a_token_border_are_no_match() -> None:
    assert common_prefix(pack([0x01000000, 5]), pack([0, 1, 5])) == 0


def test_packing_survives_a_round_trip() -> None:
    assert unpack(pack([0, 1, 2**31 - 1, 5])) == [0, 1, 2**31 - 1, 5]


class PageMemory(FakeEngine):
    """The fake engine as the memory of a trie, which has no disk to tell of restore points."""

    def _ignore(self, noted: object) -> None:
        pass

    note = forget = forget_point = check_nodes = _ignore


class Held:
    """A trie over the fake engine with one node of eleven tokens, pages of 4 and a restore point with a state at 6."""

    def __init__(self) -> None:
        self.rows, self.near, self.state = full(0), window(1), recurrent(2)
        self.engine = PageMemory((self.rows, self.near, self.state))
        self.trie = Trie(self.engine, page_tokens=4)
        self.tokens = list(range(10, 21))
        self.node = self.trie.append(self.trie.root, self.tokens)
        lane = self.engine.make_lane()
        lane.reserve(11)
        self.engine.evaluate(lane, self.tokens[:6])
        point = self.trie.add_point(self.node, 6, Reason.SYSTEM)
        point.states[self.state] = lane.capture(self.state)
        self.trie.hold_window(self.node, point, self.near, lambda *rows: [lane.publish(*rows)])
        self.engine.evaluate(lane, self.tokens[6:])
        for start, end in ((0, 4), (4, 8), (8, 11)):
            self.trie.add_page(self.node, lane.publish(self.rows, start, end))
        self.trie.check()

    def ranges(self) -> list[tuple[int, int, int]]:
        pages: list[Page] = [p for node in self.trie.walk() for pages in node.pages.values() for p in pages]
        return sorted((page.group.index, page.start, page.end) for page in pages)

    def bytes(self) -> int:
        return sum(node.nbytes for node in self.trie.walk())


@pytest.mark.parametrize("at", range(1, 11))
def test_split_then_merge_gives_the_same_rows_bytes_and_restore_points(at: int) -> None:
    held = Held()
    before = held.ranges(), held.bytes()

    head = held.trie.split(held.node, at)
    held.trie.check()

    assert held.bytes() == before[1]
    assert (6 in head.points) == (at >= 6)
    assert head.end == held.node.start == at

    merged = held.trie.merge(head)
    held.trie.check()

    assert merged is held.node
    assert (held.ranges(), held.bytes()) == before
    assert set(merged.points) == {6}


def test_a_split_cuts_only_the_page_across_it() -> None:
    held = Held()
    untouched = held.node.pages[held.rows][0], held.node.pages[held.rows][2]

    head = held.trie.split(held.node, 6)

    assert head.pages[held.rows][0] is untouched[0]
    assert held.node.pages[held.rows][-1] is untouched[1]
    assert [(p.start, p.end) for p in head.pages[held.rows]] == [(0, 4), (4, 6)]


def test_pins_move_with_the_part_they_stand_on() -> None:
    held = Held()
    low, high = Hold(held.node, 3), Hold(held.node, 9)
    held.node.holds |= {low, high}

    head = held.trie.split(held.node, 5)
    assert (low.node, high.node) == (head, held.node)

    held.trie.merge(head)
    assert low.node is high.node is held.node
    held.trie.check()


def test_trimming_by_pages_until_the_leaf_is_gone() -> None:
    held = Held()
    head = held.trie.split(held.node, 3)
    for to in (8, 6, 4):
        held.trie.trim(held.node, to)
        held.trie.check()
        assert held.node.end == to
    assert not held.node.points

    assert held.trie.remove(held.node) is head
    held.trie.remove(head)
    assert not held.engine.live


def test_window_rows_go_with_the_last_point_that_needs_them() -> None:
    held = Held()
    assert [r for r in held.ranges() if r[0] == 1] == [(1, 3, 4), (1, 4, 6)]

    held.trie.drop_point(held.node, held.node.points[6])

    assert [r for r in held.ranges() if r[0] == 1] == []
    held.trie.check()


def test_growing_joins_the_partial_last_page() -> None:
    held = Held()
    lane = held.engine.make_lane()
    lane.reserve(14)
    held.engine.evaluate(lane, [*held.tokens, 1, 2, 3])

    held.trie.grow(held.node, [1, 2, 3])
    held.trie.add_page(held.node, lane.publish(held.rows, 11, 12))
    held.trie.add_page(held.node, lane.publish(held.rows, 12, 14))

    held.trie.check()
    assert [(p.start, p.end) for p in held.node.pages[held.rows]] == [(0, 4), (4, 8), (8, 12), (12, 14)]
