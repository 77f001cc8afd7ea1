"""Room: the one budget that lanes and tree share, and how room is made in it.

Resting lanes are cleared first, because the tree holds what they hold; then the tree evicts. Before anything goes, it is
worked out whether that would help: a request that cannot fit takes nothing from the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.memory import Memory
from bough.cache.node import Node, Pin, Point
from bough.cache.session import Slot
from bough.cache.state import Kind, Page
from bough.errors import DoesNotFit


class Room:
    """What is used, what may go, and what a lane may take. Without a budget there is always room."""

    def __init__(self, memory: Memory, slots: Sequence[Slot], budget_bytes: int | None) -> None:
        self.memory = memory
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.pins: set[Pin] = set()

    @property
    def lane_bytes(self) -> int:
        return sum(slot.lane.nbytes for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold."""
        return self.memory.tree_bytes + self.lane_bytes

    @property
    def affordable_bytes(self) -> int:
        """How many bytes could be added at the most, if everything that may go went."""
        assert self.budget_bytes is not None
        return self.budget_bytes - self._fixed_bytes(None)

    def shortage(self, needed_bytes: int, spare: Slot | None = None) -> int:
        """How many bytes are missing even if everything that may go went; `spare` is a resting lane that stays."""
        if self.budget_bytes is None:
            return 0
        return max(0, self._fixed_bytes(spare) + needed_bytes - self.budget_bytes)

    def make(self, needed_bytes: int, spare: Slot | None = None) -> bool:
        """Bring used + needed within the budget: clear resting lanes, then evict. If it cannot be done, nothing goes."""
        if self.budget_bytes is None or self.used_bytes + needed_bytes <= self.budget_bytes:
            return True
        if self.shortage(needed_bytes, spare):
            return False
        while self.used_bytes + needed_bytes > self.budget_bytes:
            if not (self._clear_resting_lane(spare) or self.memory.evict_one()):
                return False
        return True

    def reserve(self, slot: Slot, total_tokens: int) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that."""
        if not self.make(self.growth(slot, total_tokens), spare=slot):
            return False
        slot.lane.reserve(total_tokens)
        return True

    def growth(self, slot: Slot, total_tokens: int) -> int:
        """Bytes that a lane takes beyond its own, at the most, while it grows to hold `total_tokens`."""
        return slot.lane.peak_for(total_tokens) - slot.lane.nbytes

    def refuse(self, needed_bytes: int) -> DoesNotFit:
        assert self.budget_bytes is not None
        return DoesNotFit(needed_bytes, self.budget_bytes, self._fixed_bytes(None))

    def clear_slot(self, slot: Slot) -> None:
        slot.tokens = b""  # first: what follows may fail
        slot.lane.clear()

    def _clear_resting_lane(self, spare: Slot | None) -> bool:
        slots = [slot for slot in self.slots if not slot.is_busy and slot is not spare and slot.lane.nbytes]
        if not slots:
            return False
        self.clear_slot(min(slots, key=lambda slot: slot.last_used))
        return True

    def _fixed_bytes(self, spare: Slot | None) -> int:
        """Bytes that stay whatever happens: of busy lanes, of `spare`, and of what busy lanes stand on."""
        lanes = sum(slot.lane.nbytes for slot in self.slots if slot.is_busy or slot is spare)
        reached: dict[Node, int] = {}
        for pin in self.pins:
            for node in pin.node.path():
                reached[node] = max(reached.get(node, 0), min(pin.offset, node.end))
        return lanes + sum(_pinned_bytes(node, at) for node, at in reached.items())


def _pinned_bytes(node: Node, at: int) -> int:
    """Bytes of a node that stay while a lane stands at `at` in it or beyond: rows, and points that are not redundant."""
    pages = (page for pages in node.pages.values() for page in pages if page.start < at and _stays(page))
    points = (point for point in node.points.values() if point.offset <= at and not _may_go(point))
    return sum(page.nbytes for page in pages) + sum(state.nbytes for point in points for state in point.states.values())


def _stays(page: Page) -> bool:
    return page.group.kind is Kind.FULL or not all(_may_go(user) for user in page.users)


def _may_go(user: Point | Pin) -> bool:
    return isinstance(user, Point) and user.is_redundant
