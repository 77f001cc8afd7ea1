"""Finishing: what is done with the path of a session that has ended.

Its nodes are touched, the duel of the policies counts it, restore points that a later one replaces are marked or dropped,
and nodes that were used together are merged: nowhere else are nodes merged while the cache runs. Then the path is handed to
the disk. Where there is a host tier, rows there are promoted as far as there is room, and idle content is demoted before
the device is full.

The path is looked up once, before anything makes room. Afterwards its nodes are where they were, but its end may have been
dropped, and pages may be in other tiers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.filling import holds_page, take_from_lane
from bough.cache.record import CaptureCosts
from bough.cache.residency import LaneSlot, LiveSequence, Residency, SaltTrie
from bough.cache.residency.policy import NEVER, Duel, Policy
from bough.cache.tree.node import Node, Reason
from bough.cache.tree.state import Kind, Page, Tier
from bough.errors import EngineError

HIGH_WATER = 0.9
"""Idle content is demoted from the device to the host as soon as this share of the budget is used."""


class Finisher:
    """Cleans up after a session: the order of eviction, merging, saving, promoting.

    A fixed policy overrules the duel. With `keeps_on_device` False nothing stays on the device but what lanes hold and what
    is not written to disk yet.
    """

    def __init__(self, residency: Residency, costs: CaptureCosts, *, policy: Policy | None, keeps_on_device: bool) -> None:
        self._residency = residency
        self._room = residency.room
        self._evictor = residency.evictor
        self._memory = residency.memory
        self._costs = costs
        self._policy = policy
        self._keeps_on_device = keeps_on_device
        self.reset_duel()

    def reset_duel(self) -> None:
        """Forget what the duel of the policies has seen."""
        self.duel = Duel(self._memory.page_tokens)

    def finish(self, sequence: LiveSequence, prompt: bytes, *, keeps_state: bool, is_whole: bool) -> None:
        """Make the lane idle, and give its path its new position in the order of eviction."""
        now, trie = self._residency.clock.now(), sequence.trie
        self._merge_chains(trie)
        path = sequence.hold.node.path()
        sequence.slot.last_used = now
        sequence.slot.free()
        sequence.lane.drop_reserve()
        self._room.release(trie, sequence.hold)
        for node in path:
            node.touch(now)
        before = self._ask_duel(sequence, prompt, now) if keeps_state else []
        _set_previous_use(path, before, self._memory.page_tokens)
        _supersede_points(path)
        self._drop_redundant(trie, path)
        path = self._merge_used_together(trie, path)
        if self._memory.tiers is not None and (keeps_state or sequence.saved_to is not None):
            if keeps_state and is_whole:
                self._promote(sequence, path)
            self._residency.saver.save(trie, trie.held_part(path))
            self._residency.saver.save_split()
            if keeps_state and self._residency.sharer is not None:
                self._residency.sharer.share(sequence, trie.held_part(path))
            self._demote_ahead()
            trie.memory.drop_replaced()
            self._residency.expiry.expire()
        if not self._keeps_on_device:
            sequence.slot.clear()
        self.clear_device()

    def clear_device(self) -> None:
        """Where nothing is to stay on the device: evict everything that does not wait to be written to disk."""
        while not self._keeps_on_device and self._evictor.evict_one(spares_waiting=True):
            pass

    def _ask_duel(self, sequence: LiveSequence, prompt: bytes, now: float) -> list[float]:
        """Show the duel a request, and evict by its winner; returns when each page of the request was used before."""
        page_bytes = self._memory.row_bytes * self._memory.page_tokens
        if self._room.budget_bytes is None or not page_bytes:
            return []
        capacity = max(0, self._residency.total_budget_bytes - self._residency.lanes.nbytes) // page_bytes
        before = self.duel.note(prompt, sequence.packed(), sequence.trie.salt, now, capacity)
        self._evictor.order.use_policy(self._policy or self.duel.policy)
        return before

    def _drop_redundant(self, trie: SaltTrie, path: Sequence[Node]) -> None:
        """Drop redundant points of a path beyond their share of its row bytes, the weakest first."""
        allowance = self._costs.redundant_allowance(path[-1].end if path else 0)
        redundant = [(node, point) for node in path for point in node.points.values() if point.is_redundant]
        redundant.sort(key=lambda found: (found[1].reason, found[1].offset), reverse=True)
        for node, point in redundant:
            allowance -= self._memory.point_bytes(point.offset)
            is_adopting = any(hold.is_adopting and hold.offset == point.offset for hold in node.holds)
            if allowance < 0 and not is_adopting:
                trie.drop_point(node, point)

    def _merge_used_together(self, trie: SaltTrie, path: Sequence[Node]) -> list[Node]:
        """Merge nodes of a path with their only child if both were last used together; returns the path as it is then."""
        end = path[-1] if path else trie.root
        for node in reversed(path):
            merged = node
            if len(node.children) == 1 and next(iter(node.children.values())).last_used == node.last_used:
                merged = trie.merge(node)
            end = merged if node is end else end
            self._evictor.offer(trie, merged)
        return end.path()

    def _merge_chains(self, trie: SaltTrie) -> None:
        """Merge the unbranched edges that have made matching slow, whenever they were last used."""
        while trie.chains:
            end = trie.chains.pop()
            for node in end.path()[-2::-1] if trie.has(end) else ():
                if len(node.children) == 1:
                    self._evictor.offer(trie, trie.merge(node))

    def _promote(self, sequence: LiveSequence, path: Sequence[Node]) -> None:
        """Bring recorded rows on the host back to the device: from the lane, which holds them too.

        As far as there is room. A page that making room for others has taken from the host is left out.
        """
        if not self._memory.host_budget_bytes or self._room.budget_bytes is None:
            return
        for node, page in _pages_on_host(sequence, path):
            has_room = self._demote_older(sequence, node, page)
            if page.tier is not Tier.HOST or node.pages_between(page.group, *page.span) != [page]:
                continue
            if not has_room:
                return
            try:
                take_from_lane(sequence, node, page)
            except (EngineError, MemoryError):
                return
            self._evictor.offer(sequence.trie, node)

    def _demote_older(self, sequence: LiveSequence, node: Node, page: Page) -> bool:
        """Demote older content, so that this page fits on the device, and into its salt's share."""
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

    def _demote_one(self, spare: LaneSlot | None = None) -> bool:
        """Demote content to the host; or clear an idle lane, if it alone holds what was demoted before."""
        return self._residency.lanes.clear_oldest_idle(spare, is_sharing=True) or self._evictor.demote_one()

    def _is_low(self, extra_bytes: int = 0) -> bool:
        """Whether the device would be used below its high-water mark."""
        assert self._room.budget_bytes is not None
        return self._room.used_bytes + extra_bytes <= HIGH_WATER * self._room.budget_bytes

    def _demote_ahead(self) -> None:
        """Demote idle content to the host before the device is full, so that the next request finds room."""
        if not self._memory.host_budget_bytes or self._room.budget_bytes is None:
            return
        while not self._is_low() and self._demote_one():
            pass


def _set_previous_use(path: Sequence[Node], before: Sequence[float], page_tokens: int) -> None:
    """Set the previous use of new nodes: when their first page was used before."""
    for node in path:
        if node.hits == 1:
            page = node.start // page_tokens
            node.previous_used = before[page] if page < len(before) else NEVER


def _supersede_points(path: Sequence[Node]) -> None:
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


def _pages_on_host(sequence: LiveSequence, path: Sequence[Node]) -> list[tuple[Node, Page]]:
    """The recorded pages of a path that are on the host, and whose rows the lane holds."""
    end, lane = min(sequence.hold.offset, sequence.lane.offset), sequence.lane
    return [
        (node, page)
        for node in path
        for pages in node.pages.values()
        for page in pages
        if page.tier is Tier.HOST and page.end <= end and holds_page(lane, page)
    ]
