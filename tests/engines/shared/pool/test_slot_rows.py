"""The rows of a lane in slots: what is written stays, what was reserved is enough, and what is counted is what is held."""

from __future__ import annotations

import random

import pytest

from bough.cache.tree.state import Group, Incoming
from bough.engines.shared.pool.arena import Arena, ArenaFull, ArenaSlot
from bough.engines.shared.pool.slot_rows import PooledRows, SlotRows
from tests.fakes import full, window

PAGE = 4
SLACK = 6


def make_rows(group: Group | None = None, num_slots: int = 100) -> tuple[Arena, PooledRows]:
    group = group or full()
    arena = Arena({group: 1}, num_slots, 1)
    return arena, PooledRows(group, arena, SLACK, PAGE)


def run(rows: PooledRows, offset: int, num_tokens: int) -> int:
    rows.make_room(offset, num_tokens)
    rows.mark_written(offset, num_tokens)
    return offset + num_tokens


def publish(arena: Arena, rows: PooledRows, start: int, end: int) -> SlotRows:
    (piece,) = rows.covering(start, end)
    arena.add_page(piece.slot)
    rows.mark_published(piece.slot)
    return piece


def spans(rows: PooledRows) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in rows.pieces]


def test_slots_are_taken_when_a_run_needs_them_and_promised_before() -> None:
    arena, rows = make_rows()
    rows.reserve(10, 0, None)
    assert (rows.nbytes, arena.used_bytes, rows.promised_bytes) == (3, 0, 3)
    run(rows, 0, 5)
    assert (rows.nbytes, arena.used_bytes, rows.promised_bytes) == (3, 2, 1)
    assert spans(rows) == [(0, 4), (4, 8)]


def test_a_branch_inside_a_page_goes_on_in_a_fresh_slot_at_the_same_places() -> None:
    arena, first = make_rows()
    second = PooledRows(first.group, arena, SLACK, PAGE)
    first.reserve(8, 0, None)
    run(first, 0, 7)
    page = publish(arena, first, 4, 6)
    second.reserve(9, 0, Incoming(6))
    second.append(SlotRows(first.pieces[0].slot, 0, 4))
    second.append(page)
    second.continue_at(6)
    run(second, 6, 3)
    assert spans(second) == [(0, 4), (4, 6), (6, 8), (8, 12)]
    assert second.pieces[1].slot is first.pieces[1].slot is not second.pieces[2].slot


def test_the_first_who_stands_at_the_mark_writes_on_and_the_second_does_not() -> None:
    arena, writer = make_rows()
    writer.reserve(4, 0, None)
    run(writer, 0, 2)
    page = publish(arena, writer, 0, 2)
    writer.free()
    first, second = (PooledRows(writer.group, arena, SLACK, PAGE) for _ in range(2))
    for rows in (first, second):
        rows.reserve(4, 0, Incoming(2))
        rows.append(page)
        rows.continue_at(2)
    assert spans(first) == [(0, 4)] and spans(second) == [(0, 2)]
    assert first.promised_bytes == 0 and second.promised_bytes == 1


def test_what_a_window_publishes_is_promised_again() -> None:
    arena, rows = make_rows(window())
    rows.reserve(100, 0, None)
    reserved, at = rows.nbytes, 0
    for _ in range(20):
        at = run(rows, at, 4)
        publish(arena, rows, at - 4, at)
        assert rows.nbytes == reserved
    rows.free()
    assert arena.used_bytes == 20


def test_a_window_goes_on_for_ever_in_what_was_reserved() -> None:
    arena, rows = make_rows(window(), num_slots=6)
    rows.reserve(10_000, 0, None)
    reserved, at = rows.nbytes, 0
    for _ in range(200):
        at = run(rows, at, SLACK)
        assert rows.nbytes <= reserved and rows.base <= rows.group.first_needed(at - SLACK)
    arena.check()


def test_a_window_of_many_pieces_has_room_for_each_that_is_copied() -> None:
    group = window(size=17)
    arena = Arena({group: 1}, 100, 1)
    page, rows = arena.take(group), PooledRows(group, arena, SLACK, 8)
    arena.add_page(page)
    page.mark = 16
    rows.reserve(100, 0, Incoming(16, {group: [(at, at + 1) for at in range(1, 16, 2)]}))
    reserved = rows.nbytes
    for at in range(0, 16, 2):
        rows.append(SlotRows(page, at, at + 1))
        rows.make_room(at + 1, 1)
        rows.mark_written(at + 1, 1)
    rows.continue_at(16)
    assert rows.nbytes <= reserved
    for at in range(16, 100, SLACK):
        run(rows, at, SLACK)
        assert rows.nbytes <= reserved


def test_a_window_that_goes_on_where_it_stands_has_its_pieces_counted() -> None:
    _, rows = make_rows(window())
    rows.reserve(8, 0, None)
    run(rows, 0, 3)
    rows.cut(2)  # what follows goes to another slot
    rows.continue_at(2)
    run(rows, 2, 1)
    rows.drop_reserve()
    rows.reserve(8, 3, None)
    reserved = rows.nbytes
    rows.continue_at(3)
    assert spans(rows) == [(0, 2), (2, 4)] and rows.nbytes == reserved


def test_what_cannot_be_promised_is_refused_and_changes_nothing() -> None:
    arena, rows = make_rows(num_slots=3)
    rows.reserve(8, 0, None)
    with pytest.raises(ArenaFull, match="2 more slots"):
        rows.reserve(16, 0, None)
    assert rows.nbytes == 2
    rows.drop_reserve()
    assert rows.nbytes == 0 and arena.can_promise(rows.group, 3)


class Walk:
    """Lanes and a tree over one arena. Slots hold the numbers of the sequences that were written to them."""

    def __init__(self, seed: int, group: Group) -> None:
        self.chance, self.group = random.Random(seed), group
        self.arena = Arena({group: 1}, 400, 1)
        self.lanes = [PooledRows(group, self.arena, SLACK, PAGE) for _ in range(3)]
        self.tokens: list[list[int]] = [[] for _ in self.lanes]
        self.content: dict[tuple[ArenaSlot, int, int], int] = {}  # by slot, its use and place
        self.pages: list[tuple[list[int], SlotRows]] = []  # with all tokens up to their end

    def step(self) -> None:
        number = self.chance.randrange(len(self.lanes))
        self.chance.choice([self.feed, self.feed, self.publish, self.publish, self.adopt, self.evict, self.go_back])(number)
        self.arena.check()
        for rows, tokens in zip(self.lanes, self.tokens, strict=True):
            held = [self.content[piece.slot, piece.slot.use, row % PAGE] for piece in rows.covering(rows.base, len(tokens))
                    for row in range(piece.start, piece.end)]  # fmt: skip
            assert held == tokens[rows.base :]
        carried = sum(rows.carried for rows in self.lanes)
        assert self.arena.used_bytes == carried + len({rows.slot for _, rows in self.pages})

    def feed(self, number: int) -> None:
        rows, tokens = self.lanes[number], self.tokens[number]
        new = [self.chance.randrange(1000) for _ in range(self.chance.randrange(1, SLACK))]
        rows.reserve(len(tokens) + len(new), len(tokens), None)
        reserved = rows.nbytes
        rows.make_room(len(tokens), len(new))
        for piece in rows.covering(len(tokens), len(tokens) + len(new)):
            assert piece.start >= piece.slot.mark and piece.slot.writer is rows
            for row in range(piece.start, piece.end):
                self.content[piece.slot, piece.slot.use, row % PAGE] = new[row - len(tokens)]
        rows.mark_written(len(tokens), len(new))
        tokens += new
        assert rows.nbytes <= reserved

    def publish(self, number: int) -> None:
        rows, tokens = self.lanes[number], self.tokens[number]
        if pieces := rows.covering(rows.base, len(tokens)):
            piece = self.chance.choice(pieces)
            before = rows.nbytes
            self.pages.append((tokens[: piece.end], publish(self.arena, rows, piece.start, piece.end)))
            assert rows.nbytes <= before

    def adopt(self, number: int) -> None:
        """Start anew with the pages of one of the sequences, as far as they follow each other; some are copied."""
        rows, chance = self.lanes[number], self.chance
        if not self.pages:
            return
        tokens, last = chance.choice(self.pages)
        found = [last]
        needed = self.group.first_needed(last.end)
        while found[0].start > needed:
            before = [page for known, page in self.pages if known == tokens[: found[0].start]]
            if not before:
                return
            found.insert(0, chance.choice(before))
        copied = [(max(page.start, needed), page.end) for page in found if chance.random() < 0.3]
        total = last.end + chance.randrange(1, 9)
        rows.reserve(total, len(self.tokens[number]), Incoming(last.end, {self.group: copied}))
        reserved = rows.nbytes
        rows.start_at(needed)
        for page in found:
            start = max(page.start, needed)
            if (start, page.end) in copied:
                self._copy_in(rows, tokens, start, page.end)
            else:
                rows.append(SlotRows(page.slot, start, page.end))
        rows.continue_at(last.end)
        self.tokens[number] = list(tokens)
        assert rows.nbytes <= reserved

    def _copy_in(self, rows: PooledRows, tokens: list[int], start: int, end: int) -> None:
        rows.make_room(start, end - start)
        for piece in rows.covering(start, end):
            for row in range(piece.start, piece.end):
                self.content[piece.slot, piece.slot.use, row % PAGE] = tokens[row]
        rows.mark_written(start, end - start)

    def go_back(self, number: int) -> None:
        rows, tokens = self.lanes[number], self.tokens[number]
        lowest = rows.base + self.group.window - 1 if rows.base else 0
        if len(tokens) > lowest:
            at = self.chance.randrange(lowest, len(tokens))
            rows.reserve(len(tokens), len(tokens), Incoming(at))
            reserved = rows.nbytes
            rows.cut(at)
            rows.continue_at(at)
            del tokens[at:]
            assert rows.nbytes <= reserved

    def evict(self, number: int) -> None:
        if self.pages:
            self.arena.drop_page(self.pages.pop(self.chance.randrange(len(self.pages)))[1].slot)

    def finish(self) -> None:
        for rows in self.lanes:
            rows.free()
        for _, rows in self.pages:
            self.arena.drop_page(rows.slot)
        self.arena.check()
        assert self.arena.used_bytes == 0 and not any(rows.nbytes for rows in self.lanes)


@pytest.mark.parametrize("group", [full(), window()], ids=["full", "window"])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_steps_keeps_rows_and_counts(seed: int, group: Group) -> None:
    walk = Walk(seed, group)
    for _ in range(150):
        walk.step()
    walk.finish()
