"""Adoption: which lane serves a prompt, from which offset, and how it gets there.

Plan first, then move. A hold holds the chosen offset, room is made, and its bytes are reserved; content on disk is read by
other threads while other requests go on; when all is there, the lane adopts it. If it does not fit, or cannot be read, the
plan is made again with less, down to nothing. A request that is refused, or cancelled while it loads, leaves its lane as it
was.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bough.cache.residency import LaneSlot, LiveSequence, Residency, SaltTrie
from bough.cache.residency.disk_load import DiskLoad
from bough.cache.residency.fetching import Fetch, open_fetch
from bough.cache.residency.loading import needed
from bough.cache.residency.node_paths import node_at
from bough.cache.tree.node import Node
from bough.cache.tree.plan import LiveRows, plan
from bough.cache.tree.state import Group, GroupSource, Incoming, Kind, Page, Range, Tier
from bough.cache.tree.tokens import common_prefix, cut, num_tokens
from bough.cache.tree.trie import Match
from bough.types import Loading


@dataclass(frozen=True)
class LaneChoice:
    """A lane for a prompt, what it shares with it, and the offset that lane and tree can be restored to."""

    slot: LaneSlot
    live: LiveRows
    offset: int


class Adopter:
    """Chooses an idle lane for a prompt, and restores the known prefix into it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._groups = residency.memory.groups
        self._lanes = residency.lanes

    def adopt(self, trie: SaltTrie, prompt: bytes, salt: str, total_tokens: int, *, reuses: bool) -> Adoption:
        """Choose a lane and let it stand as deep in the prompt as memory allows, with room for `total_tokens`.

        If content has to be read first, from disk or from the shared store, it `is_loading` afterwards. Raises LanesBusy if
        no lane is idle, DoesNotFit if the budget cannot hold that.
        """
        found = trie.match(prompt) if reuses else Match(0, [], trie.root)
        choice = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=reuses)
        fetch = self._open_fetch(trie, salt, prompt, found, choice) if reuses else None
        adoption = Adoption(self._residency, trie, prompt, salt, total_tokens, choice, fetch)
        adoption.start(found)
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
        choice = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=True)
        if self._open_fetch(trie, salt, prompt, found, choice) is not None:
            return True
        depth = loader.choose_depth(found.path, found.length, choice.live, choice.offset, num_tokens(prompt))
        return bool(loader.on_disk(found.path, choice.live, depth.offset))

    def _open_fetch(self, trie: SaltTrie, salt: str, prompt: bytes, found: Match, choice: LaneChoice) -> Fetch | None:
        """A fetch from the shared store; None without a store, or where a fetch would be useless."""
        shared = self._residency.memory.shared
        if shared is None:
            return None
        return open_fetch(self._residency.loader, shared, trie, salt, prompt, found, choice.offset)

    def _choose(self, slots: Sequence[LaneSlot], found: Match, prompt: bytes, salt: str, *, reuses: bool) -> LaneChoice:
        """The idle lane from which the deepest offset can be reached, then with most of it live, then the oldest.

        Of lanes that share nothing with the prompt, only the oldest is considered.
        """
        choices = list[LaneChoice]()
        for slot in slots:
            shared = common_prefix(slot.tokens, prompt) if reuses and slot.salt == salt else 0
            if not shared and any(not choice.live.shared for choice in choices):
                continue
            live = LiveRows.of(slot.lane, shared, self._groups)
            limit = min(max(found.length, shared), num_tokens(prompt) - 1)
            choices.append(LaneChoice(slot, live, plan(self._groups, found.path, found.length, live, limit)))
        return max(choices, key=lambda choice: (choice.offset, min(choice.live.shared, choice.offset)))


class Adoption:
    """Restores a prefix into a lane, which is busy from now on: `start`, then `advance` until it stands, or `cancel`.

    `matched` tokens of the prompt were found, and the lane stands, or will stand, at `offset`, with room for
    `total_tokens`. `is_branch`: the tree continues after the matched tokens with others than the prompt.
    """

    def __init__(
        self,
        residency: Residency,
        trie: SaltTrie,
        prompt: bytes,
        salt: str,
        total_tokens: int,
        choice: LaneChoice,
        fetch: Fetch | None,
    ) -> None:
        self._memory = residency.memory
        self._groups = residency.memory.groups
        self._room = residency.room
        self._evictor = residency.evictor
        self._loader = residency.loader
        self._trie = trie
        self._prompt = prompt
        self._live = choice.live
        self._fetch = fetch  # what the shared store has of the prompt comes first
        self.is_fetching = fetch is not None
        self._load: DiskLoad | None = None  # as soon as something has to be read from disk
        self._loading = Loading()  # without what the loads themselves know
        self.offset = choice.offset
        self.is_loading = True
        self.is_branch = False
        self._num_found = 0
        slot = choice.slot
        self._idle = (slot.salt, slot.tokens)  # the content of the lane as long as it is not touched
        slot.is_busy, slot.salt, slot.tokens = True, salt, b""
        self.sequence = LiveSequence(slot, trie, residency.forest.add_hold(trie), array("i"), total_tokens)
        self._hold, self._slot = self.sequence.hold, slot

    def _take_match(self, found: Match) -> None:
        self._num_found = found.length
        is_inner = found.length < found.node.end or bool(found.node.children)
        self.is_branch = is_inner and found.length < num_tokens(self._prompt)

    @property
    def total_tokens(self) -> int:
        return self.sequence.total_tokens

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
    def loaded_tokens(self) -> int:
        """The tokens that a lane could stand on with what has been read so far."""
        if self.is_fetching:
            return 0
        return self._load.reached() if self._load is not None and self.is_loading else self.offset

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until something more was read, or the time is over. Any thread may wait."""
        load = self._fetch if self.is_fetching else self._load
        if load is not None:
            load.wait(timeout_s)

    def start(self, found: Match) -> None:
        """Begin to read what the plan needs, and first, where that is worth it, what the shared store has of the prompt.

        If there is nothing to read, the lane stands. Raises DoesNotFit if there is no room even without reuse; then the
        lane is as it was.
        """
        self._take_match(found)
        try:
            if self._fetch is None:
                self._choose_depth(found)
            else:
                self._start_fetch(self._fetch, found)
            self.advance()
        except BaseException:
            self.cancel()
            raise

    def advance(self) -> bool:
        """Take what has been read; returns whether the lane stands now. Never waits.

        Raises DoesNotFit if something could not be read, and there is no room to compute what a lane was to share.
        """
        if self._fetch is not None and self.is_fetching and not self._advance_fetch(self._fetch):
            return False
        while self.is_loading:
            reached = self.offset if self._load is None else self._load.advance()
            if reached is None:
                return False
            if reached < self.offset:
                self._retry(reached)
            elif self._keeps_room():
                self._adopt()
            else:
                self._retry(reached // 2)
        return True

    def _start_fetch(self, fetch: Fetch, found: Match) -> None:
        """Hold what was found, and reserve the lane's memory, so that no other request takes it meanwhile."""
        self._move_hold(found, found.length)
        fetch.start(self._hold)
        if self._shortage(self.offset, 0):
            fetch.close()
            return
        if self._live.shared == 0:
            self._clear_lane()
        if not self._room.reserve(self._slot, self.total_tokens, incoming=self._incoming(self.offset)):
            fetch.close()

    def _advance_fetch(self, fetch: Fetch) -> bool:
        """Take what came from the shared store; when that is all, plan again, and return True."""
        if not fetch.advance():
            return False
        self.is_fetching = False
        found = self._trie.match(cut(self._prompt, self._hold.offset), start=self._hold)
        self._take_match(found)
        limit = min(max(found.length, self._live.shared), num_tokens(self._prompt) - 1)
        self.offset = plan(self._groups, found.path, found.length, self._live, limit)
        self._choose_depth(found)
        return True

    def _choose_depth(self, found: Match) -> None:
        """Hold and reserve the part of what was found that is loaded sooner than computed."""
        total = num_tokens(self._prompt)
        depth = self._loader.choose_depth(found.path, found.length, self._live, self.offset, total)
        self._loading = depth.loading
        self._prepare(found, depth.offset)

    def cancel(self) -> None:
        """End the adoption and make the lane idle again. Content that was read stays in the tree. May be called twice."""
        if not self._slot.is_busy:
            return
        self._close_loads()
        self._release()
        self._room.release(self._trie, self._hold)
        self._slot.is_busy = False
        self._slot.salt, self._slot.tokens = self._idle
        if self._slot.tokens:
            self._slot.lane.drop_reserve()
        else:
            self._slot.clear()

    def _prepare(self, found: Match, offset: int) -> None:
        """Hold the deepest offset for which there is room, and reserve that; with less where it does not fit."""
        while True:
            self._hold_path(found, min(offset, found.length))
            limit = self._reserve(offset)
            if limit is None:
                self.offset = offset
                return
            self._release()
            found, offset = self._plan_less(offset, limit)

    def _move_hold(self, found: Match, offset: int) -> Node:
        node = node_at(found.node, offset) if offset else self._trie.root
        self._room.move_hold(self._trie, self._hold, node, offset)
        return node

    def _hold_path(self, found: Match, offset: int) -> None:
        """Keep what restoring at `offset` needs, until the lane has adopted it or it is released."""
        node = self._move_hold(found, offset)
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

    def _reserve(self, offset: int) -> int | None:
        """Make room for the lane and for what is to be read, and reserve it.

        Returns None, or, if there is too little, an offset for which it may be enough. Nothing is evicted from the device,
        and the lane is not touched, before it is known that this helps.
        """
        loader = self._loader
        items = loader.on_disk(self._hold.node.path(), self._live, offset)
        extra_bytes = loader.loaded_bytes(items) if self._memory.load_tier is Tier.DEVICE else 0
        if shortage := self._shortage(offset, extra_bytes):
            return self._limit_for(offset, shortage)
        if self._live.shared == 0:
            self._clear_lane()  # its rows are of no use: they are not moved while the lane grows
        if items and self._load is None:
            disk = self._memory.disk
            assert disk is not None
            self._load = DiskLoad(loader, self._trie, disk, self._hold, num_tokens(self._prompt))
        if self._load is not None and (limit := self._load.make_room_for(items, offset)) is not None:
            return limit
        if not self._room.reserve(self._slot, self.total_tokens, incoming=self._incoming(offset)):
            self._stop_reading()
            return offset // 2
        if self._load is not None:
            self._load.start(items, self._live, offset)  # protected by the hold: making room has left them there
        return None

    def _stop_reading(self) -> None:
        """Give back what is reserved, before planning again."""
        if self._load is not None:
            self._load.stop()

    def _close_loads(self) -> None:
        for load in (self._fetch, self._load):
            if load is not None:
                load.close()

    def _limit_for(self, offset: int, shortage: int) -> int:
        """An offset below this one for which there may be room, if this many bytes are missing.

        Where rows are in blocks, a lane that goes on inside a page may need another block for the rest of that page.
        """
        row_bytes, page_tokens = self._memory.row_bytes, self._memory.page_tokens
        if not row_bytes:
            return offset // 2
        if not self._slot.lane.shares_rows:
            return offset - -(-shortage // row_bytes)
        border = (offset - 1) // page_tokens * page_tokens
        num_pages = -(-shortage // (row_bytes * page_tokens)) - 1
        return border - num_pages * page_tokens

    def _shortage(self, offset: int, extra_bytes: int) -> int:
        """How many bytes are missing for the lane and for `extra_bytes` to be read, even if all else is evicted."""
        room, slot, incoming = self._room, self._slot, self._incoming(offset)
        if self._live.shared:
            return room.shortage(room.growth(slot, self.total_tokens, incoming) + extra_bytes)
        return room.shortage(slot.lane.bytes_after_clear(self.total_tokens, incoming) + extra_bytes, cleared=slot)

    def _incoming(self, offset: int) -> Incoming | None:
        """What the lane will adopt at `offset`, or None if it goes on from where it stands.

        Rows that are read from disk to the device are not copied to the lane.
        """
        memory, live, copied = self._memory, self._live, dict[Group, list[Range]]()
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

    def _keeps_room(self) -> bool:
        """Whether there is still room for what is adopted: other requests may have moved pages meanwhile.

        Rows that are copied take more blocks if those between them are on the device now.
        """
        if not self._slot.lane.shares_rows:
            return True
        return self._room.reserve(self._slot, self.total_tokens, incoming=self._incoming(self.offset))

    def _clear_lane(self) -> None:
        self._idle = "", b""
        self._slot.clear()

    def _plan_less(self, offset: int, limit: int) -> tuple[Match, int]:
        """Plan again with less: the lane's own rows without the tree's, or less of the tree, or a cleared lane.

        A lane that shares rows is cleared first, because its memory may be just what is missing.
        Raises DoesNotFit if none of this is left.
        """
        live, groups, nothing = self._live, self._groups, Match(0, [], self._trie.root)
        if offset == 0:
            if live.shared == 0:
                needed_bytes = self._slot.lane.bytes_after_clear(self.total_tokens, Incoming(0))
                self.cancel()
                raise self._room.refuse(needed_bytes)
            self._live = LiveRows.nothing(groups)
            return nothing, 0
        held = self._held()
        less = plan(groups, held.path, held.length, live, max(0, limit))
        alone = plan(groups, [], 0, live, min(live.shared, offset)) if held.length else 0
        if live.shared and self._slot.lane.shares_rows:
            without = plan(groups, held.path, held.length, LiveRows.nothing(groups), offset)
            if without >= max(less, alone):
                self._live = LiveRows.nothing(groups)
                return held, without
        return (nothing, alone) if alone > less else (held, less)

    def _held(self) -> Match:
        """The part of the prompt that the hold protects."""
        return Match(self._hold.offset, self._hold.node.path(), self._hold.node)

    def _retry(self, reached: int) -> None:
        """Plan again with less, after something could not be read, or not soon enough."""
        self._stop_reading()
        self._release()
        held = self._held()
        offset = plan(self._groups, held.path, held.length, self._live, reached)
        num_recomputed = self._loading.recomputed_tokens + self.offset - offset
        self._loading = replace(self._loading, recomputed_tokens=num_recomputed)
        self._prepare(held, offset)

    def _adopt(self) -> None:
        path, slot = self._hold.node.path(), self._slot
        self._loading = replace(self._loading, host_bytes=self._host_bytes(path))
        self._idle = "", b""  # from here on only the session knows what the lane holds
        groups, live = self._groups, self._live
        slot.lane.adopt(self.offset, {group: _source(group, path, live, self.offset) for group in groups})
        self._close_loads()
        self._release()
        self.sequence.tokens = array("i", cut(self._prompt, 0, self.offset))
        self.is_loading = False

    def _host_bytes(self, path: Sequence[Node]) -> int:
        """What the lane takes from the host."""
        if self._memory.tiers is None:
            return 0
        items = (each.item for each in needed(self._groups, path, self._live, self.offset))
        return sum(item.content_bytes for item in items if item.tier is Tier.HOST)


def _source(group: Group, path: Sequence[Node], live: LiveRows, offset: int) -> GroupSource:
    """Where one group comes from: the lane itself as far as it can, else the tree."""
    if offset == 0:
        return GroupSource()
    if group.kind is Kind.FULL:
        start = min(live.shared, offset)
        return GroupSource(live=start, pages=_pages(group, path, start, offset))
    if live.can_stand(group, offset):
        return GroupSource(live=offset)
    if group.kind is Kind.WINDOW:
        return GroupSource(pages=_pages(group, path, group.first_needed(offset), offset))
    return GroupSource(state=node_at(path[-1], offset).points[offset].states[group])


def _pages(group: Group, path: Sequence[Node], start: int, end: int) -> tuple[Page, ...]:
    return tuple(page for node in path for page in node.pages_between(group, start, end))
