"""Room: the one budget that lanes and tree share on the device, and how room is made in it.

Idle lanes are cleared first, because the tree holds what they hold; then the tree evicts. Before anything is evicted, it is
worked out whether that would help: a request that cannot fit takes nothing from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import Lanes, Slot
from bough.cache.residency.memory import SaltForest, SaltTrie
from bough.cache.tree.node import Node, Pin, Point
from bough.cache.tree.state import Item, Kind, Page, Tier
from bough.errors import DoesNotFit, EngineError

Result = TypeVar("Result")


class Room:
    """What is used, what may be evicted, and what a lane may take. Without a budget there is always room."""

    def __init__(self, evictor: Evictor, lanes: Lanes, forest: SaltForest, budget_bytes: int | None) -> None:
        self.evictor = evictor
        self.budget_bytes = budget_bytes
        self._lanes = lanes
        self._forest = forest

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold on the device, or were promised there."""
        return self.evictor.memory.used_bytes(Tier.DEVICE) + self._lanes.nbytes

    def affordable(self, trie: SaltTrie) -> int:
        """The most bytes that could be added to a trie, if everything evictable were evicted."""
        assert self.budget_bytes is not None
        fits = self.budget_bytes - self._fixed_bytes(None)
        share = self.evictor.share_of(self.budget_bytes)
        return min(fits, share - self._pinned_bytes(trie)) if share < self.budget_bytes else fits

    def shortage(self, needed_bytes: int, spare: Slot | None = None) -> int:
        """How many bytes are missing even if everything evictable were evicted; `spare` is an idle lane that stays."""
        if self.budget_bytes is None:
            return 0
        return max(0, self._fixed_bytes(spare) + needed_bytes - self.budget_bytes)

    def make_room(self, needed_bytes: int, spare: Slot | None = None, trie: SaltTrie | None = None) -> bool:
        """Bring used + needed within the budget: clear idle lanes, then evict. If it cannot be done, nothing is evicted.

        What a trie gets has to fit into its salt's share too; room there is made by evicting its own content.
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
            if not (self._lanes.clear_oldest_idle(spare) or self.evictor.evict_one()):
                return False
        return True

    def _fits_share(self, trie: SaltTrie, needed_bytes: int) -> bool:
        assert self.budget_bytes is not None
        if self.evictor.share_of(self.budget_bytes) - self._pinned_bytes(trie) < needed_bytes:
            return False
        return self.evictor.make_share(Tier.DEVICE, trie, needed_bytes, self.budget_bytes)

    def reserve(self, slot: Slot, total_tokens: int, extra_bytes: int = 0) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that and for `extra_bytes`."""
        if not self.make_room(self.growth(slot, total_tokens) + extra_bytes, spare=slot):
            return False
        self.retry_after_eviction(lambda: slot.lane.reserve(total_tokens), self.growth(slot, total_tokens), spare=slot)
        return True

    def retry_after_eviction(self, take: Callable[[], Result], nbytes: int, spare: Slot) -> Result:
        """Call `take`; if the engine has no memory although the budget does, again after evicting as much as is wanted."""
        try:
            return take()
        except (EngineError, MemoryError):
            target = self.used_bytes - nbytes
            has_freed = False
            while self.used_bytes > target and (self._lanes.clear_oldest_idle(spare) or self.evictor.evict_one()):
                has_freed = True
            if not has_freed:
                raise
            return take()

    def growth(self, slot: Slot, total_tokens: int) -> int:
        """The most bytes that a lane takes beyond its own while it grows to hold `total_tokens`."""
        return slot.lane.peak_for(total_tokens) - slot.lane.nbytes

    def refuse(self, needed_bytes: int) -> DoesNotFit:
        assert self.budget_bytes is not None
        return DoesNotFit(needed_bytes, self.budget_bytes, self._fixed_bytes(None))

    def hold(self, trie: SaltTrie, pin: Pin, node: Node, offset: int) -> None:
        """Move a busy lane's pin, and offer the node that it leaves to eviction again."""
        left = pin.node
        pin.move(node, offset)
        trie.note(node)
        self._offer_path(trie, left)

    def release(self, trie: SaltTrie, pin: Pin) -> None:
        """Remove a pin, and offer the path that its lane stood on to eviction."""
        self._forest.unpin(pin)
        self._offer_path(trie, pin.node)

    def _offer_path(self, trie: SaltTrie, node: Node) -> None:
        """Offer a node; and those above it, where their content can be demoted while a lane stands below."""
        for each in [node] if self.evictor.memory.tiers is None else [*node.path(), node]:
            self.evictor.offer(trie, each)

    def _fixed_bytes(self, spare: Slot | None) -> int:
        """Bytes that cannot be evicted: of busy lanes, of `spare`, of what busy lanes stand on, and what was promised."""
        lanes_bytes = sum(slot.lane.nbytes for slot in self._lanes.slots if slot.is_busy or slot is spare)
        return lanes_bytes + self._pinned_bytes(None) + self.evictor.memory.reserved_bytes[Tier.DEVICE]

    def _pinned_bytes(self, trie: SaltTrie | None) -> int:
        """Bytes on the device that busy lanes stand on; in one trie only, if asked."""
        return sum(_pinned_bytes(node, at) for node, at in self._forest.held_nodes(trie).items())


def _pinned_bytes(node: Node, at: int) -> int:
    """Device memory of a node that stays while a lane stands at `at` in it or beyond: rows, and points of worth."""
    pages = [page for pages in node.pages.values() for page in pages if page.start < at and _is_held(page)]
    points = (point for point in node.points.values() if point.offset <= at and not _is_evictable(point))
    states = [state for point in points for state in point.states.values()]
    items: list[Item] = [*pages, *states]
    return sum(item.nbytes for item in items if item.tier is Tier.DEVICE)


def _is_held(page: Page) -> bool:
    return page.group.kind is Kind.FULL or not all(_is_evictable(user) for user in page.users)


def _is_evictable(user: Point | Pin) -> bool:
    return isinstance(user, Point) and user.is_redundant
