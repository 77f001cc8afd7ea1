"""Lanes on random trees, as the pool makes them: branches begin anywhere, and each lane grows in pieces of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bough.engines.shared.pool.plan import Piece


@dataclass
class RandomLanes:
    """Makes lanes; no two pieces that are not shared lie in the same slot."""

    rng: random.Random
    page: int
    num_slots: int = 0
    trunks: list[list[Piece]] = field(default_factory=lambda: [[]])

    def extend(self, pieces: list[Piece], end: int) -> list[Piece]:
        """The same lane with fresh slots for the rows up to `end`."""
        pieces = list(pieces)
        at = pieces[-1][2] if pieces else 0
        while at < end:
            stop = min(end, (at // self.page + 1) * self.page)
            pieces.append((self.num_slots, at, stop))
            self.num_slots += 1
            at = stop
        return pieces

    def add_trunk(self, num_rows: int) -> None:
        """Rows that lanes may share: they follow another trunk, or begin inside its last piece."""
        pieces = list(self.rng.choice(self.trunks))
        if pieces and self.rng.random() < 0.5:
            slot, start, end = pieces[-1]
            pieces[-1] = (slot, start, self.rng.randrange(start + 1, end + 1))
        end = pieces[-1][2] if pieces else 0
        self.trunks.append(self.extend(pieces, end + self.rng.randrange(1, num_rows)))

    def make(self, num_lanes: int, num_rows: int) -> tuple[list[list[Piece]], list[int]]:
        """So many lanes on the trunks, with up to so many rows of their own, and their offsets."""
        made = [self._make_lane(num_rows) for _ in range(num_lanes)]
        return [pieces for pieces, _ in made], [offset for _, offset in made]

    def _make_lane(self, num_rows: int) -> tuple[list[Piece], int]:
        base = self.rng.choice(self.trunks)
        start = base[-1][2] if base else 0
        offset = start + self.rng.randrange(num_rows)
        room = (offset // self.page + 1 + self.rng.randrange(2)) * self.page
        return self.extend(base, room), offset


def cut_before(pieces: list[Piece], row: int) -> list[Piece]:
    """The lane of a window group, which begins at this row."""
    return [(slot, max(start, row), end) for slot, start, end in pieces if end > row]
