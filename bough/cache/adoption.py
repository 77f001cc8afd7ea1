"""Adoption: an idle lane comes to stand on as much of a prompt as is known.

1. Plan: which lane, and the deepest offset that it and the tree can restore together (`tree.plan`). What the tree lacks is
   first looked for in the store that machines share; and what is below the device counts only as far as it is loaded
   sooner than computed.
2. Ask for what is lacking: a hold protects the path, memory is reserved, and other threads read what is on disk, while
   other requests go on.
3. When all is there, the lane adopts it. If there is no room, or something cannot be read in time, plan less, with what
   the hold protects, and ask again; down to nothing.

`Adoption._steps` is this list. A request that is refused, or cancelled while it loads, frees its lane: with the rows
that it had, or empty, if they were of no use for the request and had to go.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bough.cache.residency import LaneSlot, LiveSequence, Residency, SaltTrie
from bough.cache.residency.disk_load import DiskLoad
from bough.cache.residency.fetching import Fetch, open_fetch
from bough.cache.tree.node import Node
from bough.cache.tree.plan import LiveRows, needed, plan
from bough.cache.tree.state import Group, GroupSource, Incoming, Item, Kind, Page, Range, State, Tier
from bough.cache.tree.trie import Match
from bough.tokens import common_prefix, cut, num_tokens
from bough.types import Loading


@dataclass(frozen=True)
class LanePlan:
    """A lane that is to stand at `offset`, on its own rows as far as they are `live`, and on what was found in the tree."""

    slot: LaneSlot
    live: LiveRows
    found: Match
    offset: int

    @classmethod
    def deepest(cls, groups: Sequence[Group], slot: LaneSlot, live: LiveRows, found: Match, limit: int) -> LanePlan:
        """The plan for the deepest offset ≤ limit."""
        return cls(slot, live, found, plan(groups, found.path, found.length, live, limit))


class Adopter:
    """Chooses an idle lane for a prompt, and restores the known prefix into it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._groups = residency.memory.groups
        self._lanes = residency.lanes

    def adopt(self, trie: SaltTrie, prompt: bytes, total_tokens: int, *, reuses: bool) -> Adoption:
        """Choose a lane and let it stand as deep in the prompt as memory allows, with room for `total_tokens`.

        If content has to be read first, from disk or from the shared store, it `is_loading` afterwards. Raises LanesBusy if
        no lane is idle, DoesNotFit if the budget cannot hold that.
        """
        found = trie.match(prompt) if reuses else Match(0, [], trie.root)
        planned = self._choose(self._lanes.require_idle(), found, prompt, trie.salt, reuses=reuses)
        fetch = self._open_fetch(trie, trie.salt, prompt, planned) if reuses else None
        adoption = Adoption(self._residency, trie, prompt, total_tokens, planned, fetch)
        try:
            adoption.advance()
        except BaseException:
            adoption.cancel()
            raise
        return adoption

    def count_reusable(self, trie: SaltTrie, prompt: bytes, salt: str) -> int:
        """The offset that `adopt` would reach now, if there is room."""
        found = trie.match(prompt)
        if idle := self._lanes.idle():
            return self._choose(idle, found, prompt, salt, reuses=True).offset
        limit = min(found.length, num_tokens(prompt) - 1)
        return plan(self._groups, found.path, found.length, LiveRows.nothing(self._groups), limit)

    def needs_loading(self, trie: SaltTrie, prompt: bytes, salt: str) -> bool:
        """Whether `adopt` would have to read from disk, or ask the shared store, now. A lane must be idle."""
        found, loader = trie.match(prompt), self._residency.loader
        planned = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=True)
        if self._open_fetch(trie, salt, prompt, planned) is not None:
            return True
        depth = loader.choose_depth(found.path, found.length, planned.live, planned.offset, num_tokens(prompt))
        return bool(loader.on_disk(found.path, planned.live, depth.offset))

    def _open_fetch(self, trie: SaltTrie, salt: str, prompt: bytes, planned: LanePlan) -> Fetch | None:
        """A fetch from the shared store; None without a store, or where a fetch would be useless."""
        shared = self._residency.memory.shared
        if shared is None:
            return None
        return open_fetch(self._residency.loader, shared, trie, salt, prompt, planned.found, planned.offset)

    def _choose(self, slots: Sequence[LaneSlot], found: Match, prompt: bytes, salt: str, *, reuses: bool) -> LanePlan:
        """The idle lane from which the deepest offset can be reached, then with most of it live, then the oldest.

        Of lanes that share nothing with the prompt, only the oldest is considered.
        """
        plans = list[LanePlan]()
        for slot in slots:
            shared = common_prefix(slot.tokens, prompt) if reuses and slot.salt == salt else 0
            if not shared and any(not each.live.shared for each in plans):
                continue
            live = LiveRows.of(slot.lane, shared, self._groups)
            limit = min(max(found.length, shared), num_tokens(prompt) - 1)
            plans.append(LanePlan.deepest(self._groups, slot, live, found, limit))
        return max(plans, key=lambda each: (each.offset, min(each.live.shared, each.offset)))


class Adoption:
    """Restores a prefix into a lane, which is busy from now on: `advance` until it stands, or `cancel`.

    `matched` tokens of the prompt were found, and the lane stands, or will stand, at `offset`. `is_branch`: the tree
    continues after the matched tokens with others than the prompt.
    """

    def __init__(
        self,
        residency: Residency,
        trie: SaltTrie,
        prompt: bytes,
        total_tokens: int,
        planned: LanePlan,
        fetch: Fetch | None,
    ) -> None:
        self._memory = residency.memory
        self._groups = residency.memory.groups
        self._room = residency.room
        self._evictor = residency.evictor
        self._loader = residency.loader
        self._trie = trie
        self._prompt = prompt
        self._plan = planned
        self._fetch = fetch  # of what the shared store has of the prompt; before all else
        self._load: DiskLoad | None = None  # as soon as something has to be read from disk
        self._loading = Loading()  # without what the loads themselves know
        self.is_loading = True
        self._note_found(planned.found)
        self._slot = planned.slot
        self._slot.occupy()
        self.sequence = LiveSequence(self._slot, trie, residency.forest.add_hold(trie), array("i"), total_tokens)
        self._hold = self.sequence.hold
        self._remaining = self._steps()

    def _note_found(self, found: Match) -> None:
        self._num_found = found.length
        is_inner = found.length < found.node.end or bool(found.node.children)
        self.is_branch = is_inner and found.length < num_tokens(self._prompt)

    @property
    def offset(self) -> int:
        return self._plan.offset

    @property
    def matched(self) -> int:
        return max(self._num_found, self.offset)

    @property
    def loading(self) -> Loading:
        store, disk = self._fetch, self._load
        return replace(
            self._loading,
            store_bytes=store.nbytes if store is not None else 0,
            disk_bytes=disk.nbytes if disk is not None else 0,
            load_s=sum(load.load_s for load in (store, disk) if load is not None),
        )

    @property
    def _is_fetching(self) -> bool:
        return self._fetch is not None and not self._fetch.is_done

    @property
    def loaded_tokens(self) -> int:
        """The tokens that a lane could stand on with what has been read so far."""
        if self._is_fetching:
            return 0
        return self._load.reached() if self._load is not None and self.is_loading else self.offset

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until something more was read, or the time is over. Any thread may wait."""
        load = self._fetch if self._is_fetching else self._load
        if load is not None:
            load.wait(timeout_s)

    def advance(self) -> bool:
        """Go on with what has been read; returns whether the lane stands now. Never waits.

        Raises DoesNotFit if there is no room even to compute all; then it must be cancelled, as after any error.
        """
        next(self._remaining, None)
        return not self.is_loading

    def cancel(self) -> None:
        """End an adoption that is loading, and make its lane idle again. Content that was read stays in the tree."""
        self._close_loads()
        self._release()
        self._room.release(self._trie, self._hold)
        self._slot.free()
        if self._slot.tokens:
            self._slot.lane.drop_reserve()
        else:
            self._slot.clear()

    def _steps(self) -> Iterator[None]:
        """All the way onto the lane. Each `yield` waits for something that is being read."""
        if self._fetch is not None:
            self._begin_fetch(self._fetch)
            while not self._fetch.advance():
                yield
            self._plan_with_fetched()
        self._ask(self._as_deep_as_worth_loading())
        while True:
            reached = self.offset if self._load is None else self._load.advance()
            if reached is None:
                yield
            elif reached < self.offset:
                self._ask(self._plan_up_to(reached))
            elif self._keeps_room():
                break
            else:
                self._ask(self._plan_up_to(reached // 2))
        self._adopt()

    # Plan

    def _deepest(self, live: LiveRows, found: Match, limit: int) -> LanePlan:
        return LanePlan.deepest(self._groups, self._slot, live, found, limit)

    def _plan_with_fetched(self) -> None:
        """Plan again, with what has come from the shared store."""
        live, found = self._plan.live, self._trie.match(cut(self._prompt, self._hold.offset), start=self._hold)
        self._note_found(found)
        limit = min(max(found.length, live.shared), num_tokens(self._prompt) - 1)
        self._plan = self._deepest(live, found, limit)

    def _as_deep_as_worth_loading(self) -> LanePlan:
        """The part of the plan that is loaded sooner than computed."""
        live, found, total = self._plan.live, self._plan.found, num_tokens(self._prompt)
        depth = self._loader.choose_depth(found.path, found.length, live, self.offset, total)
        self._loading = depth.loading
        return replace(self._plan, offset=depth.offset)

    def _plan_up_to(self, limit: int) -> LanePlan:
        """Plan less: what lies beyond could not be read, or not soon enough, or has no room in the lane any more."""
        self._stop_reading()
        self._release()
        less = self._deepest(self._plan.live, self._held(), limit)
        num_recomputed = self._loading.recomputed_tokens + self.offset - less.offset
        self._loading = replace(self._loading, recomputed_tokens=num_recomputed)
        return less

    def _plan_with_less_memory(self, limit: int) -> LanePlan:
        """Plan less, because there is no room: less of the tree, or the lane's own rows alone, or a cleared lane.

        A lane that shares rows is cleared first, because its memory may be just what is missing.
        Raises DoesNotFit if none of this is left.
        """
        live, nothing, no_rows = self._plan.live, Match(0, [], self._trie.root), LiveRows.nothing(self._groups)
        if self.offset == 0:
            if live.shared == 0:
                raise self._room.refuse_lane(self._slot, self.sequence.total_tokens)
            return replace(self._plan, live=no_rows, found=nothing)
        held, plans = self._held(), list[LanePlan]()
        if live.shared and self._slot.lane.shares_rows:
            plans.append(self._deepest(no_rows, held, self.offset))
        plans.append(self._deepest(live, held, max(0, limit)))
        if held.length:
            plans.append(self._deepest(live, nothing, min(live.shared, self.offset)))
        return max(plans, key=lambda each: each.offset)  # the first of equal ones

    def _held(self) -> Match:
        """The part of the prompt that the hold protects."""
        return Match(self._hold.offset, self._hold.node.path(), self._hold.node)

    # Ask for what is lacking

    def _begin_fetch(self, fetch: Fetch) -> None:
        """Hold what was found, and reserve the lane's memory, so that no other request takes it meanwhile."""
        found = self._plan.found
        self._move_hold(found, found.length)
        fetch.start(self._hold)
        if self._shortage():
            fetch.close()
            return
        self._clear_useless_lane()
        if not self._reserve_lane():
            fetch.close()

    def _ask(self, wanted: LanePlan) -> None:
        """Hold what a plan needs, make room for it and begin to read it; or a lesser plan, where there is no room."""
        while True:
            self._plan = wanted
            self._hold_path()
            limit = self._reserve()
            if limit is None:
                return
            self._release()
            wanted = self._plan_with_less_memory(limit)

    def _move_hold(self, found: Match, offset: int) -> Node:
        node = found.node.at(offset) if offset else self._trie.root
        self._room.move_hold(self._trie, self._hold, node, offset)
        return node

    def _hold_path(self) -> None:
        """Keep what restoring at the offset needs, until the lane has adopted it or it is released."""
        found = self._plan.found
        node = self._move_hold(found, min(self.offset, found.length))
        self._hold.is_adopting = True
        for group in self._memory.windows:
            self._trie.hold_window(node, self._hold, group)

    def _release(self) -> None:
        """Stop holding restore point and windows; the rows up to the hold stay protected."""
        if self._hold.is_adopting:
            self._hold.is_adopting = False
            for group in self._memory.windows:
                self._trie.release_window(self._hold.node, self._hold, group)
            self._evictor.offer(self._trie, self._hold.node)

    def _reserve(self) -> int | None:
        """Make room for the lane and for what is to be read, reserve it, and begin to read.

        Returns None, or, if there is too little, an offset for which it may be enough. Nothing is evicted from the device,
        and the lane is not touched, before it is known that this helps.
        """
        loader, live, offset = self._loader, self._plan.live, self.offset
        items = loader.on_disk(self._hold.node.path(), live, offset)
        extra_bytes = loader.loaded_bytes(items) if self._memory.load_tier is Tier.DEVICE else 0
        if shortage := self._shortage(extra_bytes):
            return self._room.lesser_offset(self._slot, offset, shortage)
        self._clear_useless_lane()
        if items and self._load is None:
            disk = self._memory.disk
            assert disk is not None
            self._load = DiskLoad(loader, self._trie, disk, self._hold, num_tokens(self._prompt))
        if self._load is not None and (limit := self._load.make_room_for(items, offset)) is not None:
            return limit
        if not self._reserve_lane():
            self._stop_reading()
            return offset // 2
        if self._load is not None:
            self._load.start(items, live, offset)  # protected by the hold: making room has left them there
        return None

    def _reserve_lane(self) -> bool:
        return self._room.reserve(self._slot, self.sequence.total_tokens, incoming=self._incoming())

    def _clear_useless_lane(self) -> None:
        """Clear a lane that shares nothing with the prompt: its rows would be moved while it grows."""
        if self._plan.live.shared == 0:
            self._slot.clear()

    def _stop_reading(self) -> None:
        """Give back what is reserved, before planning again."""
        if self._load is not None:
            self._load.stop()

    def _close_loads(self) -> None:
        for load in (self._fetch, self._load):
            if load is not None:
                load.close()

    def _shortage(self, extra_bytes: int = 0) -> int:
        """How many bytes are missing for the lane and for `extra_bytes` to be read, even if all else is evicted."""
        is_cleared = self._plan.live.shared == 0
        return self._room.lane_shortage(
            self._slot, self.sequence.total_tokens, self._incoming(), extra_bytes, is_cleared=is_cleared
        )

    def _incoming(self) -> Incoming | None:
        """What the lane will adopt, or None if it goes on from where it stands.

        Rows that are read from disk to the device are not copied to the lane.
        """
        memory, live, offset, copied = self._memory, self._plan.live, self.offset, dict[Group, list[Range]]()
        if live.shared == live.offset == offset:
            return None
        if self._slot.lane.shares_rows and memory.tiers is not None:
            tiers = {Tier.HOST, Tier.DISK} if memory.load_tier is Tier.HOST else {Tier.HOST}
            for each in needed(self._groups, self._hold.node.path(), live, offset):
                if isinstance(each.item, Page) and each.item.tier in tiers:
                    group = each.item.group
                    first = live.shared if group.kind is Kind.FULL else group.first_needed(offset)
                    copied.setdefault(group, []).append((max(first, each.item.start), min(offset, each.item.end)))
        return Incoming(offset, copied)

    # Adopt

    def _keeps_room(self) -> bool:
        """Whether there is still room for what is adopted: other requests may have moved pages meanwhile.

        Rows that are copied take more blocks if those between them are on the device now.
        """
        return not self._slot.lane.shares_rows or self._reserve_lane()

    def _adopt(self) -> None:
        path, slot, live, offset = self._hold.node.path(), self._slot, self._plan.live, self.offset
        self._loading = replace(self._loading, host_bytes=self._host_bytes(path))
        slot.salt, slot.tokens = self._trie.salt, b""  # from here on only the session knows what the lane holds
        slot.lane.adopt(offset, _sources(self._groups, path, live, offset))
        self._close_loads()
        self._release()
        self.sequence.tokens = array("i", cut(self._prompt, 0, offset))
        self.is_loading = False

    def _host_bytes(self, path: Sequence[Node]) -> int:
        """What the lane takes from the host."""
        if self._memory.tiers is None:
            return 0
        items = (each.item for each in needed(self._groups, path, self._plan.live, self.offset))
        return sum(item.content_bytes for item in items if item.tier is Tier.HOST)


def _sources(groups: Sequence[Group], path: Sequence[Node], live: LiveRows, offset: int) -> dict[Group, GroupSource]:
    """Where a lane takes each group from: itself as far as it can, else the tree."""
    taken: dict[Group, list[Item]] = {group: [] for group in groups}
    for each in needed(groups, path, live, offset):
        taken[each.item.group].append(each.item)
    return {group: _source(group, items, live, offset) for group, items in taken.items()}


def _source(group: Group, items: Sequence[Item], live: LiveRows, offset: int) -> GroupSource:
    pages = tuple(item for item in items if isinstance(item, Page))
    if group.kind is Kind.FULL:
        return GroupSource(live=min(live.shared, offset), pages=pages)
    if not items:
        return GroupSource(live=offset)
    state = items[0]
    return GroupSource(pages=pages, state=state if isinstance(state, State) else None)
