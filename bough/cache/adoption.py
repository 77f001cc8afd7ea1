"""Adoption: which lane serves a prompt, from which offset, and how it gets there.

Plan first, then move. The chosen offset is held by a pin, room is made, and its bytes are reserved; what lies on disk is
read by other threads while other requests go on; when all is there, the lane adopts it. What does not fit, or cannot be
read, is planned again with less, down to nothing. A request that is refused, or cancelled while it loads, leaves its lane
as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from bough.cache.record import CaptureCosts
from bough.cache.residency import LiveSequence, Residency, SaltForest, SaltTrie, Slot
from bough.cache.residency.fetching import Fetch
from bough.cache.residency.loading import Load, needed
from bough.cache.tree.node import Node, Pin
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Incoming, Kind, Page, Range, Source, Tier
from bough.cache.tree.tokens import common_prefix, cut, num_tokens
from bough.cache.tree.trie import Match
from bough.types import Loading


@dataclass(frozen=True)
class Choice:
    """A lane for a prompt, what it shares with it, and the offset that lane and tree can be restored to."""

    slot: Slot
    live: Live
    offset: int


@dataclass(frozen=True)
class Path:
    """Nodes from below the root on, and how many tokens along them are those of the prompt."""

    nodes: Sequence[Node]
    matched: int

    def node_at(self, offset: int) -> Node | None:
        """The node in whose edge an offset lies; None for 0."""
        return next((node for node in self.nodes if node.start < offset <= node.end), None)


class Adopter:
    """Lets lanes stand on what the tree holds."""

    def __init__(self, residency: Residency, forest: SaltForest, costs: CaptureCosts) -> None:
        self.groups = residency.memory.groups
        self.windows = [group for group in self.groups if group.kind is Kind.WINDOW]
        self.room = residency.room
        self.evictor = residency.evictor
        self.loader = residency.loader
        self.fetcher = residency.fetcher
        self.forest = forest
        self.row_bytes = costs.row_bytes
        self._lanes = residency.lanes

    def adopt(self, trie: SaltTrie, prompt: bytes, salt: str, total_tokens: int, *, reuses: bool) -> Adoption:
        """Choose a lane and let it stand as deep in the prompt as memory allows, with room for `total_tokens`.

        Where something has to be read first, from disk or from the shared store, it `is_loading` afterwards. Raises
        LanesBusy if no lane is idle, DoesNotFit if the budget cannot hold so much.
        """
        found = trie.match(prompt) if reuses else Match(0, [], trie.root)
        choice = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=reuses)
        fetch = self.fetcher.open(trie, salt, prompt, found, choice.offset) if reuses else None
        adoption = Adoption(self, trie, prompt, salt, total_tokens, found, choice, fetch)
        adoption.start()
        return adoption

    def count_reusable(self, trie: SaltTrie, prompt: bytes, salt: str) -> int:
        """The offset that `adopt` would reach now, if there is room."""
        found = trie.match(prompt)
        if idle := self._lanes.idle():
            return self._choose(idle, found, prompt, salt, reuses=True).offset
        limit = min(found.length, num_tokens(prompt) - 1)
        return plan(self.groups, found.path, found.length, Live.nothing(self.groups), limit)

    def needs_loading(self, trie: SaltTrie, prompt: bytes, salt: str) -> bool:
        """Whether `adopt` would have to read from disk, or look into the shared store now. A lane must be idle."""
        found = trie.match(prompt)
        choice = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=True)
        depth = self.loader.choose_depth(found.path, found.length, choice.live, choice.offset, num_tokens(prompt))
        if self.fetcher.open(trie, salt, prompt, found, choice.offset) is not None:
            return True
        return bool(self.loader.on_disk(found.path, choice.live, depth.offset))

    def _choose(self, slots: Sequence[Slot], found: Match, prompt: bytes, salt: str, *, reuses: bool) -> Choice:
        """The idle lane from which the deepest offset can be reached, then with most of it live, then the oldest.

        Of lanes that share nothing with the prompt, only the oldest is looked at.
        """
        choices = list[Choice]()
        for slot in slots:
            shared = common_prefix(slot.tokens, prompt) if reuses and slot.salt == salt else 0
            if not shared and any(not choice.live.shared for choice in choices):
                continue
            live = Live.of(slot.lane, shared, self.groups)
            limit = min(max(found.length, shared), num_tokens(prompt) - 1)
            choices.append(Choice(slot, live, plan(self.groups, found.path, found.length, live, limit)))
        return max(choices, key=lambda choice: (choice.offset, min(choice.live.shared, choice.offset)))


class Adoption:
    """One request's way onto its lane, which is busy from now on: `start`, then `advance` until it stands, or `cancel`.

    `matched` tokens of the prompt were found, and the lane stands, or is to stand, at `offset`, with room for
    `total_tokens`. `is_branch`: the tree continues after the matched tokens with others than the prompt.
    """

    def __init__(
        self,
        adopter: Adopter,
        trie: SaltTrie,
        prompt: bytes,
        salt: str,
        total_tokens: int,
        found: Match,
        choice: Choice,
        fetch: Fetch | None,
    ) -> None:
        self._adopter = adopter
        self._trie = trie
        self._prompt = prompt
        self._live = choice.live
        self._load = Load(adopter.loader, trie, num_tokens(prompt), Loading())
        self._fetch = fetch
        self.offset = choice.offset
        self.is_loading = True
        self._take_match(found)
        slot = choice.slot
        self._idle = (slot.salt, slot.tokens)  # what the lane holds as long as it is not touched
        slot.is_busy, slot.salt, slot.tokens = True, salt, b""
        self.sequence = LiveSequence(slot, trie, adopter.forest.pin(trie), array("i"), total_tokens)

    def _take_match(self, found: Match) -> None:
        """Note what was found of the prompt."""
        self._found = Path(found.path, found.length)
        is_inner = found.length < found.node.end or bool(found.node.children)
        self.is_branch = is_inner and found.length < num_tokens(self._prompt)

    @property
    def is_fetching(self) -> bool:
        """Whether it still waits for the shared store."""
        return self._fetch is not None

    @property
    def total_tokens(self) -> int:
        return self.sequence.total_tokens

    @property
    def matched(self) -> int:
        return max(self._found.matched, self.offset)

    @property
    def loading(self) -> Loading:
        return self._load.loading

    @property
    def loaded_tokens(self) -> int:
        """How many tokens a lane could stand on with what has been read so far."""
        if self.is_fetching:
            return 0
        return self._load.reached(self._pin, self._live, self.offset) if self.is_loading else self.offset

    @property
    def _pin(self) -> Pin:
        return self.sequence.pin

    @property
    def _slot(self) -> Slot:
        return self.sequence.slot

    def start(self) -> None:
        """Hold what was found, and look for more in the shared store; or hold what is planned, reserve room for it, and
        begin to read what lies on disk. If there is nothing to read, the lane stands.

        Raises DoesNotFit if there is no room even without reuse; then the lane is as it was.
        """
        try:
            if self._fetch is None:
                self._choose_depth()
            else:
                self._start_fetch(self._fetch)
            self.advance()
        except BaseException:
            self.cancel()
            raise

    def advance(self) -> bool:
        """Take what has been read; returns whether the lane stands now. Never waits.

        Raises DoesNotFit if something could not be read, and there is no room to compute what a lane was to share.
        """
        if self._fetch is not None and not self._advance_fetch(self._fetch):
            return False
        while self.is_loading:
            if self._lacks_room():
                self._retry(self.offset)
            reached = self._load.advance(self._pin, self._live, self.offset)
            if reached is None:
                return False
            if reached < self.offset:
                self._retry(reached)
            elif self._keeps_room():
                self._stand()
            else:
                self._retry(reached // 2)
        return True

    def _start_fetch(self, fetch: Fetch) -> None:
        """Hold what was found, and reserve the lane's memory, so that no other request takes it meanwhile."""
        node = self._found.node_at(self._found.matched) or self._trie.root
        self._adopter.room.hold(self._trie, self._pin, node, self._found.matched)
        fetch.start(self._pin, lambda nbytes: self._shortage(self.offset, nbytes))
        if self._shortage(self.offset, 0):
            fetch.close()
            return
        if self._live.shared == 0:
            self._clear_lane()
        if not self._adopter.room.reserve(self._slot, self.total_tokens, incoming=self._incoming(self.offset)):
            fetch.close()

    def _advance_fetch(self, fetch: Fetch) -> bool:
        """Take what came from the shared store; when that is all, plan again, and return True."""
        if not fetch.advance():
            return False
        self._load.note_fetched(fetch.nbytes, fetch.load_s)
        self._fetch = None
        found = self._trie.match(self._prompt)
        self._take_match(found)
        limit = min(max(found.length, self._live.shared), num_tokens(self._prompt) - 1)
        self.offset = plan(self._adopter.groups, found.path, found.length, self._live, limit)
        self._choose_depth()
        return True

    def _choose_depth(self) -> None:
        """Hold and reserve as much of what was found as is loaded sooner than computed."""
        found, total = self._found, num_tokens(self._prompt)
        depth = self._adopter.loader.choose_depth(found.nodes, found.matched, self._live, self.offset, total)
        self._load.note_planned(depth.loading)
        self._prepare(found, depth.offset)

    def cancel(self) -> None:
        """End the adoption and make the lane idle again. What was read stays in the tree. A second call does nothing."""
        if not self._slot.is_busy:
            return
        if self._fetch is not None:
            self._fetch.close()
        self._load.close()
        self._release()
        self._adopter.room.release(self._trie, self._pin)
        self._slot.is_busy = False
        self._slot.salt, self._slot.tokens = self._idle
        if self._slot.tokens:
            self._slot.lane.drop_reserve()
        else:
            self._slot.clear()

    def _prepare(self, path: Path, offset: int) -> None:
        """Hold the deepest offset for which there is room, and reserve that; with less where it does not fit."""
        while True:
            self._hold(path, min(offset, path.matched))
            limit = self._reserve(offset)
            if limit is None:
                self.offset = offset
                return
            self._release()
            path, offset = self._plan_less(offset, limit)

    def _hold(self, path: Path, offset: int) -> None:
        """Keep what restoring at `offset` needs, until the lane has adopted it or it is released."""
        node = path.node_at(offset) or self._trie.root
        self._adopter.room.hold(self._trie, self._pin, node, offset)
        self._pin.is_adopting = True
        for group in self._adopter.windows:
            self._trie.hold_window(node, self._pin, group)

    def _release(self) -> None:
        """Keep restore point and windows no longer; the rows below the pin are still kept."""
        if self._pin.is_adopting:
            self._pin.is_adopting = False
            for group in self._adopter.windows:
                self._trie.release_window(self._pin.node, self._pin, group)
            self._adopter.evictor.offer(self._trie, self._pin.node)

    def _reserve(self, offset: int) -> int | None:
        """Make room for the lane and for what is to be read, and reserve it.

        Returns None, or, if there is too little, an offset for which it may be enough. Nothing is evicted from the device,
        and the lane is not touched, before it is known that this helps.
        """
        room, loader = self._adopter.room, self._adopter.loader
        items = loader.on_disk(self._pin.node.path(), self._live, offset)
        extra_bytes = loader.loaded_bytes(items) if loader.tier is Tier.DEVICE else 0
        if shortage := self._shortage(offset, extra_bytes):
            return self._limit_for(offset, shortage)
        limit = self._load.reserve_host(items)
        if limit is not None:
            return limit
        if self._live.shared == 0:
            self._clear_lane()  # nothing of it is of use: it is not moved while the lane grows
        if not room.reserve(self._slot, self.total_tokens, extra_bytes, self._incoming(offset)):
            self._load.release_room()
            return offset // 2
        self._read(offset)
        return None

    def _limit_for(self, offset: int, shortage: int) -> int:
        """An offset below this one for which there may be room, if so many bytes are missing.

        Where rows lie in blocks, a lane that goes on inside a page may need another block for the rest of that page.
        """
        row_bytes, page_tokens = self._adopter.row_bytes, self._adopter.evictor.page_tokens
        if not row_bytes:
            return offset // 2
        if not self._slot.lane.shares_rows:
            return offset - -(-shortage // row_bytes)
        border = (offset - 1) // page_tokens * page_tokens
        num_pages = -(-shortage // (row_bytes * page_tokens)) - 1
        return border - num_pages * page_tokens

    def _shortage(self, offset: int, extra_bytes: int) -> int:
        """How many bytes are missing for the lane, and for so many that are to be read, even if all else is evicted."""
        room, slot, incoming = self._adopter.room, self._slot, self._incoming(offset)
        if self._live.shared:
            return room.shortage(room.growth(slot, self.total_tokens, incoming) + extra_bytes)
        return room.shortage(slot.lane.bytes_after_clear(self.total_tokens, incoming) + extra_bytes, cleared=slot)

    def _incoming(self, offset: int) -> Incoming | None:
        """What the lane will adopt at `offset`, or None if it goes on from where it stands.

        What is read from disk to the device is not copied to the lane.
        """
        loader, live, copied = self._adopter.loader, self._live, dict[Group, list[Range]]()
        if live.shared == live.offset == offset:
            return None
        if self._slot.lane.shares_rows and loader.memory.tiers is not None:
            tiers = {Tier.HOST, Tier.DISK} if loader.tier is Tier.HOST else {Tier.HOST}
            for each in needed(self._adopter.groups, self._pin.node.path(), live, offset):
                if isinstance(each.item, Page) and each.item.tier in tiers:
                    group = each.item.group
                    first = live.shared if group.kind is Kind.FULL else group.first_needed(offset)
                    copied.setdefault(group, []).append((max(first, each.item.start), min(offset, each.item.end)))
        return Incoming(offset, copied)

    def _lacks_room(self) -> bool:
        """Whether what is to be read takes more than was reserved: a branch may have cut a page in two meanwhile."""
        loader, path = self._adopter.loader, self._pin.node.path()
        if loader.tier is not Tier.DEVICE or not self._slot.lane.shares_rows:
            return False
        at = plan(self._adopter.groups, path, self._pin.offset, self._live, self.offset)
        return at == self.offset and self._load.lacks_room(loader.on_disk(path, self._live, at))

    def _keeps_room(self) -> bool:
        """Whether there is still room for what is adopted: other requests may have moved pages meanwhile.

        Rows that are copied take more blocks if those between them lie on the device now.
        """
        if not self._slot.lane.shares_rows:
            return True
        return self._adopter.room.reserve(self._slot, self.total_tokens, incoming=self._incoming(self.offset))

    def _clear_lane(self) -> None:
        self._idle = "", b""
        self._slot.clear()

    def _read(self, offset: int) -> None:
        """Begin to read what lies on disk; room was made for it."""
        path = self._pin.node.path()  # again: making room may have merged nodes
        items = self._adopter.loader.on_disk(path, self._live, offset)
        first = min((each.start for each in items), default=0)
        self._load.start(items, plan(self._adopter.groups, path, self._pin.offset, self._live, first))

    def _plan_less(self, offset: int, limit: int) -> tuple[Path, int]:
        """Plan again with less: the lane's own rows without the tree's, or less of the tree, or a cleared lane.

        A lane that shares rows is cleared first, because what it holds may be just what is missing.
        Raises DoesNotFit if none of this is left.
        """
        live, groups = self._live, self._adopter.groups
        if offset == 0:
            if live.shared == 0:
                self._refuse()
            self._live = Live.nothing(groups)
            return Path((), 0), 0
        path = Path(self._pin.node.path(), self._pin.offset)
        less = plan(groups, path.nodes, path.matched, live, max(0, limit))
        alone = plan(groups, [], 0, live, min(live.shared, offset)) if path.matched else 0
        if live.shared and self._slot.lane.shares_rows:
            without = plan(groups, path.nodes, path.matched, Live.nothing(groups), offset)
            if without >= max(less, alone):
                self._live = Live.nothing(groups)
                return path, without
        return (Path((), 0), alone) if alone > less else (path, less)

    def _refuse(self) -> NoReturn:
        needed_bytes = self._slot.lane.bytes_after_clear(self.total_tokens, Incoming(0))
        self.cancel()
        raise self._adopter.room.refuse(needed_bytes)

    def _retry(self, reached: int) -> None:
        """Something could not be read, or not soon enough: plan again with less."""
        self._load.release_room()
        self._release()
        path = Path(self._pin.node.path(), self._pin.offset)
        offset = plan(self._adopter.groups, path.nodes, path.matched, self._live, reached)
        self._load.note_recomputed(self.offset - offset)
        self._prepare(path, offset)

    def _stand(self) -> None:
        """All is there: let the lane adopt it."""
        path, slot = self._pin.node.path(), self._slot
        self._load.note_host(path, self._live, self.offset)
        self._idle = "", b""  # from here on only the session knows what the lane holds
        slot.lane.adopt(self.offset, _sources(self._adopter.groups, path, self._live, self.offset))
        self._load.close()
        self._release()
        self.sequence.tokens = array("i", cut(self._prompt, 0, self.offset))
        self.is_loading = False


def _sources(groups: Sequence[Group], path: Sequence[Node], live: Live, offset: int) -> dict[Group, Source]:
    return {group: _source(group, path, live, offset) for group in groups}


def _source(group: Group, path: Sequence[Node], live: Live, offset: int) -> Source:
    """Where one group comes from: the lane itself as far as it can, else the tree."""
    if offset == 0:
        return Source()
    if group.kind is Kind.FULL:
        start = min(live.shared, offset)
        return Source(live=start, pages=_pages(group, path, start, offset))
    if live.can_stand(group, offset):
        return Source(live=offset)
    if group.kind is Kind.WINDOW:
        return Source(pages=_pages(group, path, group.first_needed(offset), offset))
    node = next(node for node in path if node.start < offset <= node.end)
    return Source(state=node.points[offset].states[group])


def _pages(group: Group, path: Sequence[Node], start: int, end: int) -> tuple[Page, ...]:
    return tuple(page for node in path for page in node.pages_between(group, start, end))
