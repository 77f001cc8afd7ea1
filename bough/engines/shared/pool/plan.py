"""The plan of a step: which rows attention reads for which lanes.

A lane is a list of pieces (slot, start, end): rows [start, end) of its sequence are in that slot of the pool, row r at
place r % page. Pieces follow each other without a gap. Pieces that end beyond the lane's offset are room to grow and are in
no other lane. Lanes that share rows begin with equal pieces: they share the common prefix of their lists.

An item is a range of rows, their slots, and the lanes that all see them. The items of one lane are its parts 0, 1, 2, ...;
attention computes each part by itself and joins them by log-sum-exp. Attention runs in a fixed number of programs; a unit
of work is one key head of one item, and units are dealt to the programs in waves.

A plan is valid until a lane needs a slot that is not in it: the end of a growing item is the lane's position at that step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

PAGE = 256
FIELDS = 16  # numbers of a packed item: six, up to eight slots, and two that are not used
WHOLE, GROWING, CAUSAL = 0, 1, 2
_PADDING = (0,) * (FIELDS - 6)
_COST_OF_ITEM = 64  # the time to start an item, in rows that could be read meanwhile

Piece = tuple[int, int, int]
Item = tuple[int, ...]
"""Number of lanes, first, start, end, part, kind, then the slots.

`first` is the place in the plan's order of the first lane; for an item of one lane it is the lane itself. All rows of a
whole item exist. A growing item belongs to one lane, and this step writes a row of it. A causal item has rows of the run
itself: a token sees those up to its own.
"""

_Stretch = tuple[int, int, Sequence[int]]  # rows [start, end), and the slot of each page from the first row's on
_Sizes = Counter[tuple[bool, int]]  # the number of items by (whether of one lane, -rows), which sorts as items do


class PlanTooLarge(ValueError):
    """The lanes need more parts or items than the buffers of the step have."""


@dataclass(frozen=True)
class PlanShape:
    """The limits of a plan: key heads, lanes of an item, the size of the buffers, and programs."""

    heads: int
    lanes_of_item: int
    max_parts: int
    max_items: int
    programs: int


@dataclass(frozen=True)
class Plan:
    """`order` lists the lanes so that those of an item are neighbours; `parts` has the number of parts of each lane."""

    order: list[int]
    parts: list[int]
    items: list[Item]
    rows_of_item: int
    shape: PlanShape

    @property
    def has_shared(self) -> bool:
        return any(item[0] > 1 for item in self.items)

    def pack(self, entries: int) -> array[int]:
        """Order and parts, padded to the entries of the step's buffers, then the items and zeros.

        Each program stops at the first item without lanes that it meets, so there is one for each program.
        """
        padding = (0,) * (entries - len(self.order))
        ends = -(-self.shape.programs // self.shape.heads) + 1
        packed = array("i", chain(self.order, padding, self.parts, padding, chain.from_iterable(self.items)))
        packed.frombytes(bytes(ends * FIELDS * packed.itemsize))
        return packed


def make_plan(lanes: Sequence[Sequence[Piece]], offsets: Sequence[int], shape: PlanShape, page: int = PAGE) -> Plan:
    """The plan of a step that computes row `offset` of each lane. Costs O(pieces), and little for shared ones."""
    order, branches = _find_branches(lanes, offsets, page)
    others = Counter((True, -branch.count_rows(piece)) for branch in branches for piece in branch.growing)
    items = _Items(order, _choose_rows(branches, others, shape, page), shape.lanes_of_item, page)
    parts = [0] * len(lanes)
    ends: list[int] = []
    for branch in branches:
        part = items.add_stretches(branch, ends[branch.parent] if branch.parent >= 0 else 0)
        ends.append(items.add_growing(branch, part))
        if branch.growing:
            parts[order[branch.low]] = ends[-1]
    return Plan(order, parts, items.sort(), items.rows, shape)


def make_run_plan(pieces: Sequence[Piece], offset: int, num: int, shape: PlanShape, page: int = PAGE) -> Plan:
    """The plan of a run of `num` tokens at row `offset` of one lane; its entries are the tokens.

    Rows before the run are whole items for all tokens. Rows of the run are causal items for the tokens that see any.
    """
    known = [(slot, start, min(end, offset)) for slot, start, end in pieces if start < offset]
    branch = _Branch(0, num, -1, _join_pieces(known, page), [], offset)
    causal = list(_causal_items(pieces, offset, num, shape.lanes_of_item))
    others = Counter((item[0] == 1, item[2] - item[3]) for item in causal)
    rows = _choose_rows([branch], others, shape, page, 1 + max(item[4] for item in causal))
    items = _Items(list(range(num)), rows, shape.lanes_of_item, page)
    known_parts = items.add_stretches(branch, 0)
    parts = [0] * num
    for tokens, first, start, end, part, *rest in causal:
        items.add((tokens, first, start, end, known_parts + part, *rest), end - start)
        parts[first : first + tokens] = [known_parts + part + 1] * tokens
    return Plan(items.order, parts, items.sort(), rows, shape)


def find_places(pieces: Iterable[Piece], start: int, end: int, page: int = PAGE) -> array[int]:
    """The place of each of the rows [start, end) of a lane: slot * page + row % page."""
    places = array("i")
    for slot, low, high in pieces:
        low, high = max(low, start), min(high, end)
        if low < high:
            at = slot * page + low % page
            places.extend(range(at, at + high - low))
    assert len(places) == end - start, f"pieces for {len(places)} of the rows [{start}, {end})"
    return places


@dataclass
class _Branch:
    """Rows that the lanes [low, high) of the order share. They follow those of the parent (an index of the list, or -1)."""

    low: int
    high: int
    parent: int
    stretches: list[_Stretch]
    growing: list[Piece]  # of a branch of one lane
    offset: int

    def count_rows(self, piece: Piece) -> int:
        """The rows that a growing piece is planned for: all of it as soon as it has any, since it fills up meanwhile."""
        return piece[2] - piece[1] if piece[1] <= self.offset else 0


def _find_branches(lanes: Sequence[Sequence[Piece]], offsets: Sequence[int], page: int) -> tuple[list[int], list[_Branch]]:
    """The order of lanes in which each branch is one range, and the tree of branches, parents first."""
    order = list(range(len(lanes)))
    branches: list[_Branch] = []
    work = [(0, len(lanes), 0, -1)] if lanes else []
    while work:
        low, high, depth, parent = work.pop()
        if high - low == 1:
            branches.append(_own_branch(lanes[order[low]], depth, low, parent, offsets[order[low]], page))
            continue
        group = order[low:high]
        end = _find_common_end([lanes[lane] for lane in group], depth)
        if end > depth:
            shared = lanes[group[0]][depth:end]
            assert shared[-1][2] <= min(offsets[lane] for lane in group), "a shared piece reaches beyond a lane's offset"
            branches.append(_Branch(low, high, parent, _join_pieces(shared, page), [], shared[-1][2]))
            parent = len(branches) - 1
        for members in _split(group, lanes, end):
            order[low : low + len(members)] = members
            work.append((low, low + len(members), end, parent))
            low += len(members)
    return order, branches


def _own_branch(pieces: Sequence[Piece], depth: int, low: int, parent: int, offset: int, page: int) -> _Branch:
    """The branch of one lane alone, from its piece `depth` on."""
    end = len(pieces)
    while end > depth and pieces[end - 1][2] > offset:
        end -= 1
    assert end < len(pieces), f"a lane at row {offset} has no place for it"
    return _Branch(low, low + 1, parent, _join_pieces(pieces[depth:end], page), list(pieces[end:]), offset)


def _find_common_end(group: Sequence[Sequence[Piece]], depth: int) -> int:
    """How many pieces all lanes of the group have in common, given that it is at least `depth`."""
    first = group[0]
    end = len(first)
    for other in group[1:]:
        if other[depth:end] != first[depth:end]:
            end = next(at for at in range(depth, end) if other[at : at + 1] != first[at : at + 1])
    return end


def _split(group: Sequence[int], lanes: Sequence[Sequence[Piece]], depth: int) -> Iterable[list[int]]:
    """The lanes of a group by their piece at index `depth`. Every lane has one, since each grows in a piece of its own."""
    members: dict[Piece, list[int]] = {}
    for lane in group:
        assert len(lanes[lane]) > depth, f"lane {lane} has no piece of its own to grow in"
        members.setdefault(lanes[lane][depth], []).append(lane)
    return members.values()


def _join_pieces(pieces: Sequence[Piece], page: int) -> list[_Stretch]:
    """Join pieces that meet at a page's border into stretches. Two pieces inside the same page need an item each."""
    stretches: list[_Stretch] = []
    slots: list[int] = []
    start = end = 0
    for slot, low, high in pieces:
        if not slots or low % page:
            if slots:
                stretches.append((start, end, slots))
            start, slots = low, []
        slots.append(slot)
        end = high
    return [*stretches, (start, end, slots)] if slots else stretches


def _choose_rows(branches: Sequence[_Branch], others: _Sizes, shape: PlanShape, page: int, more_parts: int = 0) -> int:
    """The rows of an item for which the waves are estimated to take least time; of equals the one with fewer items."""
    best: tuple[int, int] | None = None
    for pages in (8, 4, 2, 1):
        rows = pages * page
        sizes = others.copy()
        most_parts = more_parts + _count_items(sizes, branches, rows, shape.lanes_of_item)
        num_items = sizes.total()
        if most_parts > shape.max_parts or num_items > shape.max_items:
            break  # smaller items make more of both
        estimate = _estimate(sizes, shape)
        if best is None or estimate < best[0]:
            best = (estimate, rows)
    if best is None:
        raise PlanTooLarge(
            f"a plan with {most_parts} parts and {num_items} items: "
            f"the buffers take {shape.max_parts} parts and {shape.max_items} items"
        )
    return best[1]


def _count_items(sizes: _Sizes, branches: Sequence[_Branch], rows: int, lanes_of_item: int) -> int:
    """Add the items of the branches to `sizes`; returns the largest number of parts of a lane."""
    parts: list[int] = []
    for branch in branches:
        part = parts[branch.parent] if branch.parent >= 0 else 0
        for start, end, _ in branch.stretches:
            part += -(-end // rows) - start // rows
            _count_stretch(sizes, start, end, branch.high - branch.low, rows, lanes_of_item)
        parts.append(part + len(branch.growing))
    return max(parts, default=0)


def _count_stretch(sizes: _Sizes, start: int, end: int, num_lanes: int, rows: int, lanes_of_item: int) -> None:
    num_single = num_lanes if lanes_of_item == 1 else int(num_lanes % lanes_of_item == 1)
    num_shared = -(-num_lanes // lanes_of_item) - num_single
    first, last = -(-start // rows) * rows, end // rows * rows
    cut_off = [end - start] if first > last else [first - start, end - last]
    for is_single, num in ((False, num_shared), (True, num_single)):
        if num and first < last:
            sizes[is_single, -rows] += num * (last - first) // rows
        for size in cut_off:
            if num and size:
                sizes[is_single, -size] += num


def _estimate(sizes: _Sizes, shape: PlanShape) -> int:
    """The time of all waves, in rows: each takes as long as its first unit, which is the largest."""
    estimate = wave = units = 0
    for (_, size), num in sorted(sizes.items()):
        units += num * shape.heads
        begun = -(-units // shape.programs)
        estimate += (begun - wave) * (_COST_OF_ITEM - size)
        wave = begun
    return estimate


def _causal_items(pieces: Sequence[Piece], offset: int, num: int, tokens_of_item: int) -> Iterable[Item]:
    """The items of a run's own rows, for each group of tokens those that it sees; parts are counted from 0."""
    own = [(slot, max(start, offset), min(end, offset + num)) for slot, start, end in pieces]
    for first in range(0, num, tokens_of_item):
        tokens = min(tokens_of_item, num - first)
        seen = [piece for piece in own if piece[1] < min(piece[2], offset + first + tokens)]
        for part, (slot, start, end) in enumerate(seen):
            yield (tokens, first, start, end, part, CAUSAL, slot, *_PADDING[1:])


class _Items:
    """The items of a plan whose whole items are cut at multiples of `rows`."""

    def __init__(self, order: list[int], rows: int, lanes_of_item: int, page: int) -> None:
        self.order, self.rows = order, rows
        self._lanes_of_item, self._page = lanes_of_item, page
        self._sized: list[tuple[bool, int, int, Item]] = []

    def add(self, item: Item, num_rows: int) -> None:
        self._sized.append((item[0] == 1, -num_rows, item[2], item))

    def add_stretches(self, branch: _Branch, part: int) -> int:
        """Add whole items for the stretches of a branch, from this part on; returns the number of the next part."""
        for start, end, slots in branch.stretches:
            first_page = start // self._page
            while start < end:
                border = min(end, (start // self.rows + 1) * self.rows)
                own = slots[start // self._page - first_page : (border - 1) // self._page - first_page + 1]
                rest = (start, border, part, WHOLE, *own, *_PADDING[len(own) :])
                for first in range(branch.low, branch.high, self._lanes_of_item):
                    num = min(self._lanes_of_item, branch.high - first)
                    self.add((num, first if num > 1 else self.order[first], *rest), border - start)
                start, part = border, part + 1
        return part

    def add_growing(self, branch: _Branch, part: int) -> int:
        """Add an item for each growing piece of a branch; returns the number of the next part."""
        for piece in branch.growing:
            item = (1, self.order[branch.low], piece[1], piece[2], part, GROWING, piece[0], *_PADDING[1:])
            self.add(item, branch.count_rows(piece))
            part += 1
        return part

    def sort(self) -> list[Item]:
        """Items of several lanes first, larger before smaller, and those on the same rows together, for the cache."""
        self._sized.sort()
        return [item for *_, item in self._sized]
