"""Adoption: which lane serves a prompt, from which offset, and how it gets there.

Plan first, then move. Making room for the lane may evict, merge and cut what was planned: the chosen offset is held by a
pin, room is made, and only then the pages are looked up and read back from disk. What does not fit, or cannot be read, is
planned again with less, down to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bough.cache.residency.loading import Loader, bytes_on_disk, choose_depth
from bough.cache.session import Adoption, Slot
from bough.cache.tree.node import Node, Pin
from bough.cache.tree.plan import Live, plan
from bough.cache.tree.state import Group, Kind, Page, Source
from bough.cache.tree.tokens import common_prefix, num_tokens
from bough.cache.tree.trie import Match, Trie

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Choice:
    """A lane for a prompt, what it shares with it, and the offset that lane and tree can be restored to."""

    slot: Slot
    live: Live
    offset: int


def adopt(cache: PrefixCache, trie: Trie, prompt: bytes, salt: str, total_tokens: int, *, reuses: bool) -> Adoption:
    """Choose a lane and let it stand as deep in the prompt as memory allows."""
    found = trie.match(prompt) if reuses else Match(0, [], trie.root)
    choice = _choose(cache, found, prompt, salt, reuses=reuses)
    slot = choice.slot
    pin = Pin(trie.root, 0)
    total = num_tokens(prompt)
    depth = choose_depth(cache, found.path, found.length, choice.live, choice.offset, total)
    loader = Loader(cache, trie, total, depth.loading)
    try:
        slot.is_busy, slot.salt, slot.tokens = True, salt, b""  # from here on only the session knows what the lane holds
        cache.add_pin(pin)
        offset = _stand(cache, found, replace(choice, offset=depth.offset), pin, total_tokens, loader)
    except BaseException:
        cache.drop_pin(trie, pin)
        slot.is_busy = False
        cache.room.clear_slot(slot)
        raise
    is_branch = found.length < found.node.end or bool(found.node.children)
    return Adoption(slot, pin, max(found.length, offset), offset, is_branch and found.length < total, loader.loading)


def reusable(cache: PrefixCache, trie: Trie, prompt: bytes, salt: str) -> int:
    """The offset that `adopt` would reach now, if there is room."""
    found = trie.match(prompt)
    if any(not slot.is_busy for slot in cache.slots):
        return _choose(cache, found, prompt, salt, reuses=True).offset
    nothing = Live(0, -1, dict.fromkeys(cache.groups, 0))
    return plan(cache.groups, found.path, found.length, nothing, min(found.length, num_tokens(prompt) - 1))


def _choose(cache: PrefixCache, found: Match, prompt: bytes, salt: str, *, reuses: bool) -> Choice:
    """The resting lane from which the deepest offset can be reached, then the one with most of it live, then the oldest."""
    choices = []
    for slot in cache.resting():
        shared = common_prefix(slot.tokens, prompt) if reuses and slot.salt == salt else 0
        live = Live.of(slot.lane, shared, cache.groups)
        limit = min(max(found.length, shared), num_tokens(prompt) - 1)
        choices.append(Choice(slot, live, plan(cache.groups, found.path, found.length, live, limit)))
    return max(choices, key=lambda choice: (choice.offset, min(choice.live.shared, choice.offset)))


def _stand(cache: PrefixCache, found: Match, choice: Choice, pin: Pin, total_tokens: int, loader: Loader) -> int:
    """Hold the planned offset, make room, look up again, and let the lane adopt; with less where that does not fit.

    Where the tree's copy is what does not fit, the lane's own rows alone may still reach as deep.
    """
    slot, live, offset, trie = choice.slot, choice.live, choice.offset, loader.trie
    path, matched = found.path, found.length
    if live.shared == 0:
        cache.room.clear_slot(slot)  # nothing of it is of use: do not move it while the lane grows
    while True:
        with _held(cache, trie, pin, path, min(offset, matched)):
            extra = cache.make_load_room(trie, bytes_on_disk(cache, pin.node.path(), live, offset))
            if cache.room.reserve(slot, total_tokens, extra):
                reached = loader.load(pin.node.path(), live, offset)
                if reached == offset:
                    loader.note_host(pin.node.path(), live, offset)
                    slot.lane.adopt(offset, _sources(cache.groups, pin.node.path(), live, offset))
                    return offset
            else:
                reached = None
                shortage = cache.room.shortage(cache.room.growth(slot, total_tokens) + extra, spare=slot)
        if reached is not None:
            path, matched = pin.node.path(), pin.offset
            offset = plan(cache.groups, path, matched, live, reached)
        elif offset > 0:
            path, matched, offset = _plan_less(cache, pin, live, offset, shortage)
        elif slot.lane.nbytes:
            cache.room.clear_slot(slot)
        else:
            raise cache.room.refuse(slot.lane.bytes_for(total_tokens))


def _plan_less(cache: PrefixCache, pin: Pin, live: Live, offset: int, shortage: int) -> tuple[list[Node], int, int]:
    """The next best thing: the lane's own rows without the tree's, or less of the tree, by what was missing."""
    row_bytes = cache.costs.row_bytes
    limit = offset - -(-shortage // row_bytes) if row_bytes and shortage else offset // 2
    path, matched = pin.node.path(), pin.offset
    less = plan(cache.groups, path, matched, live, max(0, limit))
    alone = plan(cache.groups, [], 0, live, min(live.shared, offset)) if matched else 0
    return ([], 0, alone) if alone > less else (path, matched, less)


@contextmanager
def _held(cache: PrefixCache, trie: Trie, pin: Pin, path: Sequence[Node], offset: int) -> Iterator[None]:
    """Keep what restoring at `offset` needs, while room is made and the lane adopts it."""
    node = next((each for each in path if each.start < offset <= each.end), trie.root)
    windows = [group for group in cache.groups if group.kind is Kind.WINDOW]
    cache.move_pin(trie, pin, node, offset)
    pin.is_adopting = True
    for group in windows:
        trie.hold_window(node, pin, group)
    try:
        yield
    finally:
        pin.is_adopting = False
        for group in windows:
            trie.let_window_go(pin.node, pin, group)
        cache.evictor.offer(trie, pin.node)


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
