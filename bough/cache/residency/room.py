"""Room: the one budget that lanes and tree share on the device, and how room is made in it.

Idle lanes are cleared first, because the tree holds what they hold; then the tree evicts. Nothing is evicted unless that
makes enough room: a request that cannot fit takes nothing from the others.

A block that lanes and tree share counts once. It is free only when neither a page nor a lane has rows in it: evicting a
page or clearing a lane may free nothing yet, so evicting goes on until there is room, or nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.lanes import Lanes, LaneSlot
from bough.cache.residency.memory import SaltForest, SaltTrie, memory_bytes
from bough.cache.tree.node import Hold, Node, Point
from bough.cache.tree.state import Incoming, Item, Kind, Page, Tier
from bough.errors import DoesNotFit, EngineError

Result = TypeVar("Result")


class Room:
    """The device's budget: what is used, what may be evicted, what a lane may take. Without one there is always room."""

    def __init__(self, evictor: Evictor, lanes: Lanes, forest: SaltForest, budget_bytes: int | None) -> None:
        self.evictor = evictor
        self.budget_bytes = budget_bytes
        self._memory = evictor.memory
        self._lanes = lanes
        self._forest = forest
        self._shares_rows = any(slot.lane.shares_rows for slot in lanes.slots)

    @property
    def used_bytes(self) -> int:
        """Every byte that lanes and tree hold on the device, or were promised there."""
        return self._memory.used_bytes(Tier.DEVICE) + self._lanes.nbytes

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
        return share - self._held_bytes(trie) - trie.memory.reserved_bytes[Tier.DEVICE]

    def shortage(self, needed_bytes: int, spare: LaneSlot | None = None, cleared: LaneSlot | None = None) -> int:
        """How many bytes are missing even if everything evictable were evicted.

        `spare` is an idle lane that stays, `cleared` a busy one that will be cleared. As long as nothing is missing, this
        costs no look at the pages.
        """
        if self.budget_bytes is None:
            return 0
        left = self.budget_bytes - needed_bytes
        if self._shares_rows:
            return 0 if self.used_bytes <= left else max(0, self._fixed_bytes(spare, cleared) - left)
        left -= sum(slot.lane.nbytes for slot in self._fixed_slots(spare, cleared))
        left -= self._memory.reserved_bytes[Tier.DEVICE]
        return 0 if self._fits_held(None, left) else self._held_bytes(None) - left

    def make_room(
        self, needed_bytes: int, spare: LaneSlot | None = None, trie: SaltTrie | None = None, share_bytes: int | None = None
    ) -> bool:
        """Bring used + needed within the budget: clear idle lanes, then evict. If it cannot be done, nothing is evicted.

        Content for a trie has to fit into its salt's share too, where room is made by evicting the trie's own content. Rows
        that a lane shares count there (`share_bytes`) though they take no new memory.
        """
        if self.budget_bytes is None:
            return True
        if not self.can_make_room(needed_bytes, spare, trie, share_bytes):
            return False
        share_bytes = needed_bytes if share_bytes is None else share_bytes
        if trie is not None and not self.evictor.make_share(Tier.DEVICE, trie, share_bytes, self.budget_bytes):
            return False
        while self.used_bytes + needed_bytes > self.budget_bytes:
            if not self._free_one(spare):
                return False
        return True

    def _free_one(self, spare: LaneSlot | None) -> bool:
        """Clear an idle lane, or evict from the tree; False if there is nothing left to free."""
        return self._lanes.clear_oldest_idle(spare) or self.evictor.evict_one()

    def can_make_room(
        self, needed_bytes: int, spare: LaneSlot | None = None, trie: SaltTrie | None = None, share_bytes: int | None = None
    ) -> bool:
        """Whether `make_room` would help, changing nothing."""
        if self.budget_bytes is None:
            return True
        share = self.evictor.share_of(self.budget_bytes)
        if trie is not None and share < self.budget_bytes:
            left = share - (needed_bytes if share_bytes is None else share_bytes)
            if not self._fits_held(trie, left - trie.memory.reserved_bytes[Tier.DEVICE]):
                return False
        return self.used_bytes + needed_bytes <= self.budget_bytes or not self.shortage(needed_bytes, spare)

    def reserve(self, slot: LaneSlot, total_tokens: int, extra_bytes: int = 0, incoming: Incoming | None = None) -> bool:
        """Let a lane grow to hold `total_tokens`, if room can be made for that and for `extra_bytes`."""
        growth = self.growth(slot, total_tokens, incoming)
        if not self.make_room(growth + extra_bytes, spare=slot):
            return False
        self.retry_after_eviction(lambda: slot.lane.reserve(total_tokens, incoming), growth, spare=slot)
        return True

    def retry_after_eviction(self, take: Callable[[], Result], nbytes: int, spare: LaneSlot) -> Result:
        """Call `take`; if the engine has no memory although the budget does, again after evicting this many bytes.

        Where memory is in blocks, free memory may be scattered: then more is evicted until it works, or nothing is left.
        """
        has_evicted = False
        while True:
            try:
                return take()
            except (EngineError, MemoryError):
                may_retry = self._shares_rows or not has_evicted
                if not may_retry or not self._evict(1 if has_evicted else nbytes, spare):
                    raise
                has_evicted = True

    def _evict(self, nbytes: int, spare: LaneSlot) -> bool:
        """Free this many bytes more than are free now, or all that can be; False if nothing was evicted."""
        target, has_evicted = self.used_bytes - nbytes, False
        while self.used_bytes > target and self._free_one(spare):
            has_evicted = True
        return has_evicted

    def growth(self, slot: LaneSlot, total_tokens: int, incoming: Incoming | None = None) -> int:
        """The most bytes that a lane takes beyond its own while it grows to hold `total_tokens`."""
        return slot.lane.peak_for(total_tokens, incoming) - slot.lane.nbytes

    def lane_shortage(
        self, slot: LaneSlot, total_tokens: int, incoming: Incoming | None, extra_bytes: int, *, is_cleared: bool
    ) -> int:
        """How many bytes are missing for a busy lane to grow, or to be cleared and grow, and for `extra_bytes`."""
        if is_cleared:
            return self.shortage(slot.lane.bytes_after_clear(total_tokens, incoming) + extra_bytes, cleared=slot)
        return self.shortage(self.growth(slot, total_tokens, incoming) + extra_bytes)

    def lesser_offset(self, slot: LaneSlot, offset: int, shortage: int) -> int:
        """An offset below this one for which there may be room, if this many bytes are missing for a lane to stand there.

        Where rows are in blocks, a lane that goes on inside a page may need another block for the rest of that page.
        """
        row_bytes, page_tokens = self._memory.row_bytes, self._memory.page_tokens
        if not row_bytes:
            return offset // 2
        if not slot.lane.shares_rows:
            return offset - -(-shortage // row_bytes)
        border = (offset - 1) // page_tokens * page_tokens
        num_pages = -(-shortage // (row_bytes * page_tokens)) - 1
        return border - num_pages * page_tokens

    def refuse(self, needed_bytes: int, cleared: LaneSlot | None = None) -> DoesNotFit:
        """The error for what cannot be held, beside what cannot be evicted; `cleared` is as in `shortage`."""
        assert self.budget_bytes is not None
        return DoesNotFit(needed_bytes, self.budget_bytes, self._fixed_bytes(cleared=cleared))

    def refuse_lane(self, slot: LaneSlot, total_tokens: int) -> DoesNotFit:
        """The error for a busy lane that cannot hold `total_tokens`, whatever it reuses."""
        return self.refuse(slot.lane.bytes_after_clear(total_tokens, Incoming(0)), cleared=slot)

    def move_hold(self, trie: SaltTrie, hold: Hold, node: Node, offset: int) -> None:
        """Move a busy lane's hold, and offer what it leaves to eviction again. On its way down that is one node at most."""
        left = hold.node
        if node is left and offset == hold.offset:
            return
        goes_down = left.is_root or left in node.upwards(left.start)
        hold.move(node, offset)
        trie.memory.note(node)
        if goes_down:
            self.evictor.offer(trie, left)
        else:
            self._offer_path(trie, left)

    def release(self, trie: SaltTrie, hold: Hold) -> None:
        """Remove a hold, and offer the path that its lane stood on to eviction."""
        self._forest.remove_hold(hold)
        self._offer_path(trie, hold.node)

    def _offer_path(self, trie: SaltTrie, node: Node) -> None:
        """Offer a node; and those above it, where their content can be demoted while a lane stands below."""
        for each in [node] if self._memory.tiers is None else node.path() or [node]:
            self.evictor.offer(trie, each)

    def _fixed_bytes(self, spare: LaneSlot | None = None, cleared: LaneSlot | None = None) -> int:
        """Bytes that cannot be evicted: of busy lanes, of `spare`, of what busy lanes stand on, and what was promised.

        Without a lane that is about to be cleared. Each block counts once.
        """
        lanes, held = [slot.lane for slot in self._fixed_slots(spare, cleared)], self._held_items(None)
        in_pages = {page.block for page in held if isinstance(page, Page) and page.block is not None}
        lane_blocks = {block for lane in lanes for block in lane.blocks()} - in_pages
        lane_bytes = sum(block.nbytes for block in lane_blocks) + sum(lane.own_bytes for lane in lanes)
        return lane_bytes + memory_bytes(held) + self._memory.reserved_bytes[Tier.DEVICE]

    def _fixed_slots(self, spare: LaneSlot | None, cleared: LaneSlot | None) -> list[LaneSlot]:
        """The lanes that cannot be cleared."""
        return [slot for slot in self._lanes.slots if (slot.is_busy or slot is spare) and slot is not cleared]

    def _fits_held(self, trie: SaltTrie | None, nbytes: int) -> bool:
        """Whether what busy lanes stand on fits into `nbytes`; in one trie only, if asked.

        Every page is looked at only if neither the bytes of the whole tree fit nor an upper bound, which looks at nodes.
        """
        memory = self._memory if trie is None else trie.memory
        return (
            memory.num_bytes[Tier.DEVICE] <= nbytes
            or self._most_held_bytes(trie) <= nbytes
            or self._held_bytes(trie) <= nbytes
        )

    def _held_bytes(self, trie: SaltTrie | None) -> int:
        """Bytes on the device that busy lanes stand on; in one trie only, if asked. Costs a look at every page there."""
        return memory_bytes(self._held_items(trie))

    def _held_items(self, trie: SaltTrie | None) -> list[Item]:
        """The items on the device that busy lanes stand on; in one trie only, if asked."""
        items: list[Item] = []
        for node, at in self._forest.held_nodes(trie).items():
            items += _rows(node, at)
            items += _point_items(node, at)
        return items

    def _most_held_bytes(self, trie: SaltTrie | None) -> int:
        """At least as much as `_held_bytes`: as if all rows of full attention were there, on the device."""
        num_rows, nbytes = 0, 0
        for node, at in self._forest.held_nodes(trie).items():
            nbytes += memory_bytes(_point_items(node, at))
            if self._shares_rows:
                nbytes += self._most_block_bytes(node, at)
            else:
                num_rows += min(node.end, at + self._memory.page_tokens) - node.start
        return num_rows * self._memory.row_bytes + nbytes

    def _most_block_bytes(self, node: Node, at: int) -> int:
        """At least as much as the blocks of a node's rows up to `at` take: as if each page had its own."""
        found = (node.pages_between(group, node.start, at) for group in node.pages if group.kind is Kind.FULL)
        return sum(len(pages) * self._memory.store.device_bytes(pages[0]) for pages in found if pages)


def _rows(node: Node, at: int) -> list[Page]:
    """The rows of full attention on the device that stay while a lane stands at `at` in a node, or beyond."""
    groups = [group for group in node.pages if group.kind is Kind.FULL]
    pages = (page for group in groups for page in node.pages_between(group, node.start, at))
    return [page for page in pages if page.tier is Tier.DEVICE]


def _point_items(node: Node, at: int) -> list[Item]:
    """The states and window rows that stay on the device then: of points not redundant, and of lanes that adopt one."""
    windows = (pages for group, pages in node.pages.items() if group.kind is Kind.WINDOW)
    points = (point for point in node.points.values() if point.offset <= at and not _is_evictable(point))
    items: list[Item] = [state for point in points for state in point.states.values()]
    items += (page for pages in windows for page in pages if page.start < at and not all(map(_is_evictable, page.users)))
    return [item for item in items if item.tier is Tier.DEVICE]


def _is_evictable(user: Point | Hold) -> bool:
    return isinstance(user, Point) and user.is_redundant
