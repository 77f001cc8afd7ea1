"""Room: the one budget that lanes and tree share on the device, and how room is made in it.

Idle lanes are cleared first, because the tree holds what they hold; then the tree evicts. Before anything is evicted, it is
worked out whether that would help: a request that cannot fit takes nothing from the others.

A block that lanes and tree share counts once. It is free only when neither a page nor a lane has rows in it: evicting a
page or clearing a lane may free nothing yet, so evicting goes on until there is room, or nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import Lanes, Slot
from bough.cache.residency.memory import SaltForest, SaltTrie, memory_bytes
from bough.cache.tree.node import Node, Pin, Point
from bough.cache.tree.state import Incoming, Item, Kind, Page, Tier
from bough.errors import DoesNotFit, EngineError

Result = TypeVar("Result")


class Room:
    """What is used, what may be evicted, and what a lane may take. Without a budget there is always room."""

    def __init__(self, evictor: Evictor, lanes: Lanes, forest: SaltForest, budget_bytes: int | None) -> None:
        self.evictor = evictor
        self.budget_bytes = budget_bytes
        self._lanes = lanes
        self._forest = forest
        self._shares_rows = any(slot.lane.shares_rows for slot in lanes.slots)
        self._row_bytes = sum(group.bytes_per_token for group in evictor.memory.groups if group.kind is Kind.FULL)

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold on the device, or were promised there."""
        return self.evictor.memory.used_bytes(Tier.DEVICE) + self._lanes.nbytes

    def affordable(self, trie: SaltTrie) -> int:
        """The most bytes that could be added to a trie, if everything evictable were evicted."""
        assert self.budget_bytes is not None
        return min(self.budget_bytes - self._fixed_bytes(), self.affordable_share(trie))

    def affordable_share(self, trie: SaltTrie) -> int:
        """The most bytes that could come to count for a trie, if everything evictable of it were evicted."""
        assert self.budget_bytes is not None
        share = self.evictor.share_of(self.budget_bytes)
        if share >= self.budget_bytes:
            return self.budget_bytes
        return share - self._pinned_bytes(trie) - trie.memory.reserved_bytes[Tier.DEVICE]

    def shortage(self, needed_bytes: int, spare: Slot | None = None, cleared: Slot | None = None) -> int:
        """How many bytes are missing even if everything evictable were evicted.

        `spare` is an idle lane that stays, `cleared` a busy one that will be cleared. Where nothing is missing, which is
        usual, this costs no look at the pages.
        """
        if self.budget_bytes is None:
            return 0
        left = self.budget_bytes - needed_bytes
        if self._shares_rows:
            fits = self.used_bytes <= left
            return 0 if fits else max(0, self._fixed_bytes(spare, cleared) - left)
        left -= self._fixed_lane_bytes(spare, cleared)
        return 0 if self._fits_pinned(None, left) else self._pinned_bytes(None) - left

    def make_room(
        self, needed_bytes: int, spare: Slot | None = None, trie: SaltTrie | None = None, share_bytes: int | None = None
    ) -> bool:
        """Bring used + needed within the budget: clear idle lanes, then evict. If it cannot be done, nothing is evicted.

        What a trie gets has to fit into its salt's share too; room there is made by evicting its own content. What it gets
        of a lane that shares rows counts there (`share_bytes`) though it is no new memory.
        """
        if self.budget_bytes is None:
            return True
        if not self.can_make_room(needed_bytes, spare, trie, share_bytes):
            return False
        share_bytes = needed_bytes if share_bytes is None else share_bytes
        if trie is not None and not self.evictor.make_share(Tier.DEVICE, trie, share_bytes, self.budget_bytes):
            return False
        while self.used_bytes + needed_bytes > self.budget_bytes:
            if not (self._lanes.clear_oldest_idle(spare) or self.evictor.evict_one()):
                return False
        return True

    def can_make_room(
        self, needed_bytes: int, spare: Slot | None = None, trie: SaltTrie | None = None, share_bytes: int | None = None
    ) -> bool:
        """Whether `make_room` would help, changing nothing."""
        if self.budget_bytes is None:
            return True
        if trie is not None and not self._can_share(trie, needed_bytes if share_bytes is None else share_bytes):
            return False
        return self.used_bytes + needed_bytes <= self.budget_bytes or not self.shortage(needed_bytes, spare)

    def _can_share(self, trie: SaltTrie, needed_bytes: int) -> bool:
        assert self.budget_bytes is not None
        share = self.evictor.share_of(self.budget_bytes)
        if share >= self.budget_bytes:
            return True
        return self._fits_pinned(trie, share - needed_bytes - trie.memory.reserved_bytes[Tier.DEVICE])

    def reserve(self, slot: Slot, total_tokens: int, extra_bytes: int = 0, incoming: Incoming | None = None) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that and for `extra_bytes`."""
        growth = self.growth(slot, total_tokens, incoming)
        if not self.make_room(growth + extra_bytes, spare=slot):
            return False
        self.retry_after_eviction(lambda: slot.lane.reserve(total_tokens, incoming), growth, spare=slot)
        return True

    def retry_after_eviction(self, take: Callable[[], Result], nbytes: int, spare: Slot) -> Result:
        """Call `take`; if the engine has no memory although the budget does, again after evicting as much as is wanted.

        Where memory is in blocks, what is free may lie scattered: then more is evicted until it works, or nothing is left.
        """
        try:
            return take()
        except (EngineError, MemoryError):
            if not self._evict(nbytes, spare):
                raise
        while self._shares_rows:
            try:
                return take()
            except (EngineError, MemoryError):
                if not self._evict(1, spare):
                    raise
        return take()

    def _evict(self, nbytes: int, spare: Slot) -> bool:
        """Evict until so many bytes are free that were not before, or nothing is left; False if nothing was evicted."""
        target, has_evicted = self.used_bytes - nbytes, False
        while self.used_bytes > target and (self._lanes.clear_oldest_idle(spare) or self.evictor.evict_one()):
            has_evicted = True
        return has_evicted

    def growth(self, slot: Slot, total_tokens: int, incoming: Incoming | None = None) -> int:
        """The most bytes that a lane takes beyond its own while it grows to hold `total_tokens`."""
        return slot.lane.peak_for(total_tokens, incoming) - slot.lane.nbytes

    def refuse(self, needed_bytes: int) -> DoesNotFit:
        assert self.budget_bytes is not None
        return DoesNotFit(needed_bytes, self.budget_bytes, self._fixed_bytes())

    def hold(self, trie: SaltTrie, pin: Pin, node: Node, offset: int) -> None:
        """Move a busy lane's pin, and offer what it leaves to eviction again. On its way down that is one node at most."""
        left = pin.node
        if node is left and offset == pin.offset:
            return
        goes_down = _is_above(left, node)
        pin.move(node, offset)
        trie.note(node)
        if goes_down:
            self.evictor.offer(trie, left)
        else:
            self._offer_path(trie, left)

    def release(self, trie: SaltTrie, pin: Pin) -> None:
        """Remove a pin, and offer the path that its lane stood on to eviction."""
        self._forest.unpin(pin)
        self._offer_path(trie, pin.node)

    def _offer_path(self, trie: SaltTrie, node: Node) -> None:
        """Offer a node; and those above it, where their content can be demoted while a lane stands below."""
        for each in [node] if self.evictor.memory.tiers is None else node.path() or [node]:
            self.evictor.offer(trie, each)

    def _fixed_bytes(self, spare: Slot | None = None, cleared: Slot | None = None) -> int:
        """Bytes that cannot be evicted: of busy lanes, of `spare`, of what busy lanes stand on, and what was promised.

        Without a lane that is about to be cleared. Each block counts once.
        """
        lanes = [slot.lane for slot in self._fixed_slots(spare, cleared)]
        pinned = self._pinned(None)
        blocks = {block for lane in lanes for block in lane.blocks()}
        blocks.update(page.block for page in pinned if isinstance(page, Page) and page.block is not None)
        nbytes = sum(block.nbytes for block in blocks) + sum(lane.own_bytes for lane in lanes)
        without_block = (item for item in pinned if not isinstance(item, Page) or item.block is None)
        return nbytes + sum(item.nbytes for item in without_block) + self.evictor.memory.reserved_bytes[Tier.DEVICE]

    def _fixed_lane_bytes(self, spare: Slot | None, cleared: Slot | None) -> int:
        """Bytes of lanes that cannot be cleared, of the busy ones and of `spare`, and what was promised to loads."""
        lanes_bytes = sum(slot.lane.nbytes for slot in self._fixed_slots(spare, cleared))
        return lanes_bytes + self.evictor.memory.reserved_bytes[Tier.DEVICE]

    def _fixed_slots(self, spare: Slot | None, cleared: Slot | None) -> list[Slot]:
        return [slot for slot in self._lanes.slots if (slot.is_busy or slot is spare) and slot is not cleared]

    def _fits_pinned(self, trie: SaltTrie | None, nbytes: int) -> bool:
        """Whether what busy lanes stand on fits into so many bytes; in one trie only, if asked.

        Every page is looked at only if neither the bytes of the whole tree fit nor an upper bound, which looks at nodes.
        """
        memory = self.evictor.memory if trie is None else trie.memory
        return (
            memory.num_bytes[Tier.DEVICE] <= nbytes
            or self._most_pinned_bytes(trie) <= nbytes
            or self._pinned_bytes(trie) <= nbytes
        )

    def _pinned_bytes(self, trie: SaltTrie | None) -> int:
        """Bytes on the device that busy lanes stand on; in one trie only, if asked. Costs a look at every page there."""
        return memory_bytes(self._pinned(trie))

    def _pinned(self, trie: SaltTrie | None) -> list[Item]:
        """What lies on the device and busy lanes stand on; in one trie only, if asked."""
        items: list[Item] = []
        for node, at in self._forest.held_nodes(trie).items():
            items += _rows(node, at)
            items += _point_items(node, at)
        return items

    def _most_pinned_bytes(self, trie: SaltTrie | None) -> int:
        """At least as much as `_pinned_bytes`: as if all rows of full attention were there, on the device."""
        num_rows, nbytes = 0, 0
        for node, at in self._forest.held_nodes(trie).items():
            nbytes += memory_bytes(_point_items(node, at))
            if self._shares_rows:
                nbytes += self._most_block_bytes(node, at)
            else:
                num_rows += min(node.end, at + self.evictor.page_tokens) - node.start
        return num_rows * self._row_bytes + nbytes

    def _most_block_bytes(self, node: Node, at: int) -> int:
        """At least as much as the blocks of a node's rows up to `at` take: as if each page had its own."""
        found = (node.pages_between(group, node.start, at) for group in node.pages if group.kind is Kind.FULL)
        return sum(len(pages) * self.evictor.memory.store.device_bytes(pages[0]) for pages in found if pages)


def _is_above(node: Node, other: Node) -> bool:
    """Whether a node lies on the path to another one, or is that one."""
    below: Node | None = other
    while below is not None and below is not node:
        below = below.parent
    return below is not None


def _rows(node: Node, at: int) -> list[Page]:
    """The rows of full attention on the device that stay while a lane stands at `at` in a node, or beyond."""
    groups = [group for group in node.pages if group.kind is Kind.FULL]
    pages = (page for group in groups for page in node.pages_between(group, node.start, at))
    return [page for page in pages if page.tier is Tier.DEVICE]


def _point_items(node: Node, at: int) -> list[Item]:
    """What stays on the device then for restore points of worth, and for lanes that adopt one: states and window rows."""
    windows = (pages for group, pages in node.pages.items() if group.kind is Kind.WINDOW)
    points = (point for point in node.points.values() if point.offset <= at and not _is_evictable(point))
    items: list[Item] = [state for point in points for state in point.states.values()]
    items += (page for pages in windows for page in pages if page.start < at and _is_held(page))
    return [item for item in items if item.tier is Tier.DEVICE]


def _is_held(page: Page) -> bool:
    return not all(_is_evictable(user) for user in page.users)


def _is_evictable(user: Point | Pin) -> bool:
    return isinstance(user, Point) and user.is_redundant
