"""Finishing: what follows when a session has ended, for the path that it used.

Its nodes are touched, the duel of the policies counts it, restore points that a later one replaces are marked or dropped,
and nodes that were used together merge. Then the path is handed to the disk. Where there is a host tier, what lies there is
promoted as far as there is room, and idle content is demoted before the device is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.filling import holds_page, take_from_lane
from bough.cache.record import CaptureCosts
from bough.cache.residency import Clock, LiveSequence, Residency, SaltTrie, Slot
from bough.cache.residency.policy import Policy
from bough.cache.residency.shadow import NEVER, Duel
from bough.cache.tree.node import Node, Reason
from bough.cache.tree.state import Kind, Page, Tier
from bough.cache.tree.tokens import num_tokens
from bough.errors import EngineError

HIGH_WATER = 0.9
"""Idle content is demoted from the device to the host as soon as this share of the budget is used."""


class Finisher:
    """Ends the use that a session made of its lane and its path.

    With a fixed policy the duel is not asked. With `keeps_on_device` False nothing stays on the device but what lanes hold
    and what is not written to disk yet.
    """

    def __init__(
        self,
        residency: Residency,
        costs: CaptureCosts,
        page_tokens: int,
        clock: Clock,
        *,
        policy: Policy | None,
        keeps_on_device: bool,
    ) -> None:
        self.duel = Duel(page_tokens)
        self._residency = residency
        self._room = residency.room
        self._evictor = residency.evictor
        self._memory = residency.memory
        self._costs = costs
        self._page_tokens = page_tokens
        self._clock = clock
        self._policy = policy
        self._keeps_on_device = keeps_on_device

    def reset_duel(self) -> None:
        """Forget what the duel of the policies has seen."""
        self.duel = Duel(self._page_tokens)

    def finish(self, sequence: LiveSequence, prompt: bytes, salt: str, *, stores: bool, is_whole: bool) -> None:
        """Make the lane idle, and give its path its new position in the order of eviction."""
        now, path, trie = self._clock.now(), sequence.pin.node.path(), sequence.trie
        reached = sequence.packed(0, sequence.pin.offset)
        sequence.slot.is_busy = False
        sequence.slot.last_used = now
        sequence.lane.drop_reserve()
        self._room.release(trie, sequence.pin)
        for node in path:
            node.touch(now)
        before = self._ask_duel(sequence, prompt, salt, now) if stores else []
        _note_earlier_use(path, before, self._page_tokens)
        _supersede(path)
        self._thin(trie, path)
        for node in reversed(path):
            self._evictor.settle(trie, node)
        if self._memory.tiers is not None and (stores or sequence.saved_to is not None):
            if stores and is_whole:
                self._promote(sequence, reached)
            self._residency.saver.save(trie, reached)
            self._residency.saver.save_split()
            if stores:
                self._residency.sharer.share(sequence, reached)
            self._demote_ahead()
            trie.memory.drop_replaced()
            self._residency.expiry.expire()
        if not self._keeps_on_device:
            sequence.slot.clear()
        self.clear_device()

    def clear_device(self) -> None:
        """Where nothing is to stay on the device: evict all of it, but what still waits to be written to disk."""
        while not self._keeps_on_device and self._evictor.evict_one(spares_waiting=True):
            pass

    def _ask_duel(self, sequence: LiveSequence, prompt: bytes, salt: str, now: float) -> list[float]:
        """Show the duel a request, and evict by its winner; returns when each page of the request was used before."""
        page_bytes = self._costs.row_bytes * self._page_tokens
        if self._room.budget_bytes is None or not page_bytes:
            return []
        capacity = max(0, self._residency.total_budget_bytes - self._residency.lanes.nbytes) // page_bytes
        before = self.duel.note(prompt, sequence.packed(), salt, now, capacity)
        self._evictor.order.use_policy(self._policy or self.duel.policy)
        return before

    def _thin(self, trie: SaltTrie, path: Sequence[Node]) -> None:
        """Drop the redundant points of a path that are beyond their share of its row bytes, the shallowest first."""
        allowance = self._costs.redundant_allowance(path[-1].end if path else 0)
        redundant = [(node, point) for node in path for point in node.points.values() if point.is_redundant]
        redundant.sort(key=lambda found: (found[1].reason, found[1].offset), reverse=True)
        for node, point in redundant:
            allowance -= self._costs.point_bytes(point.offset)
            is_adopting = any(pin.is_adopting and pin.offset == point.offset for pin in node.pins)
            if allowance < 0 and not is_adopting:
                trie.drop_point(node, point)

    def _promote(self, sequence: LiveSequence, tokens: bytes) -> None:
        """Bring recorded rows that lie on the host back to the device: from the lane, which holds them too.

        The path is looked at once, and again only when making room has changed it.
        """
        if not self._memory.has_host or self._room.budget_bytes is None:
            return
        while not self._promote_pages(sequence, _pages_on_host(sequence, tokens)):
            pass

    def _promote_pages(self, sequence: LiveSequence, found: Sequence[tuple[Node, Page]]) -> bool:
        """Promote pages in this order as far as there is room; False if one of them is no longer where it was found."""
        stamps = {node: node.stamp for node, _ in found}
        for node, page in found:
            has_room = self._demote_older(sequence, node, page)
            if node.stamp != stamps[node] or node.pages_between(page.group, *page.span) != [page]:
                return False
            if not has_room:
                return True
            try:
                take_from_lane(sequence, node, page)
            except (EngineError, MemoryError):
                return True
            self._evictor.offer(sequence.trie, node)
            stamps[node] = node.stamp
        return True

    def _demote_older(self, sequence: LiveSequence, node: Node, page: Page) -> bool:
        """Demote what was used longer ago, so that this page fits on the device, and into its salt's share."""
        assert self._room.budget_bytes is not None
        memory, lane = sequence.trie.memory, sequence.lane
        nbytes = share_bytes = page.nbytes
        if lane.shares_rows:
            block = lane.spans(page.group, *page.span)[0].block
            share_bytes = 0 if block is None or memory.has_pages_in(block) else block.nbytes
            nbytes = share_bytes if page.group.kind is Kind.WINDOW else 0
        if memory.num_bytes[Tier.DEVICE] + share_bytes > self._evictor.share_of(self._room.budget_bytes):
            return False
        while not self._is_low(nbytes):
            oldest = self._evictor.order.peek(Tier.DEVICE)
            if oldest is None or oldest.node.last_used >= node.last_used or not self._demote_one(sequence.slot):
                return False
        return True

    def _demote_one(self, spare: Slot | None = None) -> bool:
        """Demote something to the host; or clear an idle lane, if it is all that holds what was demoted before."""
        return self._residency.lanes.clear_oldest_idle(spare, is_sharing=True) or self._evictor.demote_one()

    def _is_low(self, extra_bytes: int = 0) -> bool:
        """Whether the device would be used below its high-water mark."""
        assert self._room.budget_bytes is not None
        return self._room.used_bytes + extra_bytes <= HIGH_WATER * self._room.budget_bytes

    def _demote_ahead(self) -> None:
        """Demote idle content to the host before the device is full, so that the next request finds room."""
        if not self._memory.has_host or self._room.budget_bytes is None:
            return
        while not self._is_low() and self._demote_one():
            pass


def _note_earlier_use(path: Sequence[Node], before: Sequence[float], page_tokens: int) -> None:
    """Set the earlier use of new nodes: when their first page was used before."""
    for node in path:
        if node.hits == 1:
            page = node.start // page_tokens
            node.previous_used = before[page] if page < len(before) else NEVER


def _supersede(path: Sequence[Node]) -> None:
    """Mark the points of a path that a deeper one of the same reason replaces; where paths part, they are branch points."""
    seen: set[Reason] = set()
    for node in reversed(path):
        for point in sorted(node.points.values(), key=lambda each: -each.offset):
            if point.reason >= Reason.BRANCH:
                continue
            if point.offset == node.end and len(node.children) > 1:
                point.reason = Reason.BRANCH
            elif point.reason in seen:
                point.superseded = True
            seen.add(point.reason)


def _pages_on_host(sequence: LiveSequence, tokens: bytes) -> list[tuple[Node, Page]]:
    """The pages of these tokens' path that lie on the host, and whose rows the lane holds."""
    end, lane = min(num_tokens(tokens), sequence.lane.offset), sequence.lane
    return [
        (node, page)
        for node in sequence.trie.match(tokens).path
        for pages in node.pages.values()
        for page in pages
        if page.tier is Tier.HOST and page.end <= end and holds_page(lane, page)
    ]
