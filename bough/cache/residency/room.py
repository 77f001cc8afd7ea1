"""Room: the one budget that lanes and tree share on the device, and how room is made in it.

Resting lanes are cleared first, because the tree holds what they hold; then the tree evicts. Before anything goes, it is
worked out whether that would help: a request that cannot fit takes nothing from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Item
from bough.cache.session import Slot
from bough.cache.tree.node import Node, Pin, Point
from bough.cache.tree.state import Kind, Page, Place
from bough.cache.tree.trie import Trie
from bough.errors import DoesNotFit, EngineError

Result = TypeVar("Result")


class Room:
    """What is used, what may go, and what a lane may take. Without a budget there is always room."""

    def __init__(self, evictor: Evictor, slots: Sequence[Slot], budget_bytes: int | None, pins: set[Pin]) -> None:
        self.evictor = evictor
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.pins = pins

    @property
    def lane_bytes(self) -> int:
        return sum(slot.lane.nbytes for slot in self.slots)

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold on the device."""
        return self.evictor.memory.tree_bytes + self.lane_bytes

    def affordable(self, trie: Trie) -> int:
        """How many bytes could be added to a trie at the most, if everything that may go went."""
        assert self.budget_bytes is not None
        fits = self.budget_bytes - self._fixed_bytes(None)
        share = self.evictor.share_of(self.budget_bytes)
        return min(fits, share - self._pinned_bytes(trie)) if share < self.budget_bytes else fits

    def shortage(self, needed_bytes: int, spare: Slot | None = None) -> int:
        """How many bytes are missing even if everything that may go went; `spare` is a resting lane that stays."""
        if self.budget_bytes is None:
            return 0
        return max(0, self._fixed_bytes(spare) + needed_bytes - self.budget_bytes)

    def make(self, needed_bytes: int, spare: Slot | None = None, trie: Trie | None = None) -> bool:
        """Bring used + needed within the budget: clear resting lanes, then evict. If it cannot be done, nothing goes.

        What a trie is to get has to fit into its salt's share too, in which it makes room among its own.
        """
        if self.budget_bytes is None:
            return True
        if trie is not None and not self._fits_share(trie, needed_bytes):
            return False
        if self.used_bytes + needed_bytes <= self.budget_bytes:
            return True
        if self.shortage(needed_bytes, spare):
            return False
        while self.used_bytes + needed_bytes > self.budget_bytes:
            if not (self._clear_resting_lane(spare) or self.evictor.evict_one()):
                return False
        return True

    def _fits_share(self, trie: Trie, needed_bytes: int) -> bool:
        assert self.budget_bytes is not None
        if self.evictor.share_of(self.budget_bytes) - self._pinned_bytes(trie) < needed_bytes:
            return False
        return self.evictor.make_share(Place.DEVICE, trie, needed_bytes, self.budget_bytes)

    def reserve(self, slot: Slot, total_tokens: int, extra_bytes: int = 0) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that and for what else is about to come."""
        if not self.make(self.growth(slot, total_tokens) + extra_bytes, spare=slot):
            return False
        self.insist(lambda: slot.lane.reserve(total_tokens), self.growth(slot, total_tokens), spare=slot)
        return True

    def insist(self, take: Callable[[], Result], nbytes: int, spare: Slot) -> Result:
        """Take memory; if the engine has none although the budget does, once more after as much was let go as is wanted."""
        try:
            return take()
        except (EngineError, MemoryError):
            target = self.used_bytes - nbytes
            has_freed = False
            while self.used_bytes > target and (self._clear_resting_lane(spare) or self.evictor.evict_one()):
                has_freed = True
            if not has_freed:
                raise
            return take()

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
        return sum(slot.lane.nbytes for slot in self.slots if slot.is_busy or slot is spare) + self._pinned_bytes(None)

    def _pinned_bytes(self, trie: Trie | None) -> int:
        """Bytes on the device that busy lanes stand on; in one trie only, if asked."""
        reached: dict[Node, int] = {}
        for pin in self.pins:
            path = pin.node.path()
            if trie is None or (path and path[0].parent is trie.root):
                for node in path:
                    reached[node] = max(reached.get(node, 0), min(pin.offset, node.end))
        return sum(_pinned_bytes(node, at) for node, at in reached.items())


def _pinned_bytes(node: Node, at: int) -> int:
    """Device memory of a node that stays while a lane stands at `at` in it or beyond: rows, and points of worth."""
    pages = [page for pages in node.pages.values() for page in pages if page.start < at and _stays(page)]
    points = (point for point in node.points.values() if point.offset <= at and not _may_go(point))
    states = [state for point in points for state in point.states.values()]
    items: list[Item] = [*pages, *states]
    return sum(item.nbytes for item in items if item.place is Place.DEVICE)


def _stays(page: Page) -> bool:
    return page.group.kind is Kind.FULL or not all(_may_go(user) for user in page.users)


def _may_go(user: Point | Pin) -> bool:
    return isinstance(user, Point) and user.is_redundant
