"""Adoption: which lane serves a prompt, from which offset, and how it gets there.

Plan first, then move. Making room for the lane may evict, merge and cut what was planned: the chosen offset is held by a
pin, room is made, and only then the pages are looked up and read back from disk. What does not fit, or cannot be read, is
planned again with less, down to nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bough.cache.record import CaptureCosts
from bough.cache.residency import LiveSequence, Residency, SaltForest, SaltTrie, Slot
from bough.cache.residency.loading import Load
from bough.cache.tree.node import Node, Pin
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Kind, Page, Source
from bough.cache.tree.tokens import common_prefix, cut, num_tokens
from bough.cache.tree.trie import Match
from bough.types import Loading


@dataclass(frozen=True)
class Adoption:
    """A busy lane that stands in the tree, pinned; `matched` tokens of the prompt were found.

    `is_branch`: the tree continues from there with other tokens than the prompt.
    """

    sequence: LiveSequence
    matched: int
    is_branch: bool
    loading: Loading


@dataclass(frozen=True)
class Choice:
    """A lane for a prompt, what it shares with it, and the offset that lane and tree can be restored to."""

    slot: Slot
    live: Live
    offset: int


class Adopter:
    """Lets lanes stand on what the tree holds."""

    def __init__(self, residency: Residency, forest: SaltForest, costs: CaptureCosts) -> None:
        self._groups = residency.memory.groups
        self._windows = [group for group in self._groups if group.kind is Kind.WINDOW]
        self._lanes = residency.lanes
        self._room = residency.room
        self._evictor = residency.evictor
        self._loader = residency.loader
        self._forest = forest
        self._costs = costs

    def adopt(self, trie: SaltTrie, prompt: bytes, salt: str, total_tokens: int, *, reuses: bool) -> Adoption:
        """Choose a lane and let it stand as deep in the prompt as memory allows, with room for `total_tokens`.

        Raises LanesBusy if no lane is idle, DoesNotFit if the budget cannot hold so much.
        """
        found = trie.match(prompt) if reuses else Match(0, [], trie.root)
        choice = self._choose(self._lanes.require_idle(), found, prompt, salt, reuses=reuses)
        slot, total = choice.slot, num_tokens(prompt)
        depth = self._loader.choose_depth(found.path, found.length, choice.live, choice.offset, total)
        load = Load(self._loader, trie, total, depth.loading)
        pin = self._forest.pin(trie)
        try:
            slot.is_busy, slot.salt, slot.tokens = (
                True,
                salt,
                b"",
            )  # from here on only the session knows what the lane holds
            offset = self._stand(found, replace(choice, offset=depth.offset), pin, total_tokens, load)
        except BaseException:
            self._room.release(trie, pin)
            slot.is_busy = False
            slot.clear()
            raise
        is_branch = found.length < found.node.end or bool(found.node.children)
        sequence = LiveSequence(slot, trie, pin, array("i", cut(prompt, 0, offset)))
        return Adoption(sequence, max(found.length, offset), is_branch and found.length < total, load.loading)

    def count_reusable(self, trie: SaltTrie, prompt: bytes, salt: str) -> int:
        """The offset that `adopt` would reach now, if there is room."""
        found = trie.match(prompt)
        if idle := self._lanes.idle():
            return self._choose(idle, found, prompt, salt, reuses=True).offset
        nothing = Live(0, -1, dict.fromkeys(self._groups, 0))
        return plan(self._groups, found.path, found.length, nothing, min(found.length, num_tokens(prompt) - 1))

    def _choose(self, slots: Sequence[Slot], found: Match, prompt: bytes, salt: str, *, reuses: bool) -> Choice:
        """The idle lane from which the deepest offset can be reached, then with most of it live, then the oldest."""
        choices = []
        for slot in slots:
            shared = common_prefix(slot.tokens, prompt) if reuses and slot.salt == salt else 0
            live = Live.of(slot.lane, shared, self._groups)
            limit = min(max(found.length, shared), num_tokens(prompt) - 1)
            choices.append(Choice(slot, live, plan(self._groups, found.path, found.length, live, limit)))
        return max(choices, key=lambda choice: (choice.offset, min(choice.live.shared, choice.offset)))

    def _stand(self, found: Match, choice: Choice, pin: Pin, total_tokens: int, load: Load) -> int:
        """Hold the planned offset, make room, look up again, and let the lane adopt; with less where that does not fit.

        Where the tree's rows are what does not fit, the lane's own rows alone may still reach as deep.
        """
        slot, live, offset, room = choice.slot, choice.live, choice.offset, self._room
        path, matched = found.path, found.length
        if live.shared == 0:
            slot.clear()  # nothing of it is of use: do not move it while the lane grows
        while True:
            with self._held(load.trie, pin, path, min(offset, matched)):
                on_disk = self._loader.bytes_on_disk(pin.node.path(), live, offset)
                extra = self._loader.make_room(load.trie, on_disk)
                if room.reserve(slot, total_tokens, extra):
                    reached = load.run(pin.node.path(), live, offset)
                    if reached == offset:
                        load.note_host(pin.node.path(), live, offset)
                        slot.lane.adopt(offset, _sources(self._groups, pin.node.path(), live, offset))
                        return offset
                else:
                    reached = None
                    shortage = room.shortage(room.growth(slot, total_tokens) + extra, spare=slot)
            if reached is not None:
                path, matched = pin.node.path(), pin.offset
                offset = plan(self._groups, path, matched, live, reached)
            elif offset > 0:
                path, matched, offset = self._plan_less(pin, live, offset, shortage)
            elif slot.lane.nbytes:
                slot.clear()
            else:
                raise room.refuse(slot.lane.bytes_for(total_tokens))

    def _plan_less(self, pin: Pin, live: Live, offset: int, shortage: int) -> tuple[list[Node], int, int]:
        """Plan again with less: the lane's own rows without the tree's, or less of the tree, by what was missing."""
        row_bytes = self._costs.row_bytes
        limit = offset - -(-shortage // row_bytes) if row_bytes and shortage else offset // 2
        path, matched = pin.node.path(), pin.offset
        less = plan(self._groups, path, matched, live, max(0, limit))
        alone = plan(self._groups, [], 0, live, min(live.shared, offset)) if matched else 0
        return ([], 0, alone) if alone > less else (path, matched, less)

    @contextmanager
    def _held(self, trie: SaltTrie, pin: Pin, path: Sequence[Node], offset: int) -> Iterator[None]:
        """Keep what restoring at `offset` needs, while room is made and the lane adopts it."""
        node = next((each for each in path if each.start < offset <= each.end), trie.root)
        self._room.hold(trie, pin, node, offset)
        pin.is_adopting = True
        for group in self._windows:
            trie.hold_window(node, pin, group)
        try:
            yield
        finally:
            pin.is_adopting = False
            for group in self._windows:
                trie.release_window(pin.node, pin, group)
            self._evictor.offer(trie, pin.node)


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
