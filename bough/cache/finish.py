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

from bough.cache.filling import Promoter
from bough.cache.record import CaptureCosts
from bough.cache.residency import LiveSequence, Residency, SaltTrie
from bough.cache.residency.policy import NEVER, Duel, Policy
from bough.cache.tree.node import Node, Reason


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
        self._promoter = Promoter(residency)
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
            self._use_other_tiers(sequence, path, keeps_state=keeps_state, is_whole=is_whole)
        if not self._keeps_on_device:
            sequence.slot.clear()
        self.clear_device()

    def _use_other_tiers(self, sequence: LiveSequence, path: Sequence[Node], *, keeps_state: bool, is_whole: bool) -> None:
        """Promote what the lane holds, hand the path to disk and store, and demote what was not used lately."""
        trie, saver, sharer = sequence.trie, self._residency.saver, self._residency.sharer
        if keeps_state and is_whole:
            self._promoter.promote(sequence, path)
        saver.save(trie, trie.held_part(path))
        saver.save_split()
        if keeps_state and sharer is not None:
            sharer.share(sequence, trie.held_part(path))
        self._promoter.demote_ahead()
        trie.memory.drop_replaced()
        self._residency.expiry.expire()

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
