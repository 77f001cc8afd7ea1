"""Coming to rest: what follows when a session has ended, for the path that it used.

Its nodes are touched, the duel hears of it, restore points whose role has passed make way, nodes that were used together
merge. Then the path is handed to the disk, and, where there is a host place, what lies there moves up as far as there is
room, and what is idle moves down before the device is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.cache.record import supersede, thin
from bough.cache.residency.evictor import memory_of
from bough.cache.residency.saving import save, save_parted
from bough.cache.residency.shadow import NEVER
from bough.cache.session import Session
from bough.cache.tree.node import Node
from bough.cache.tree.state import Kind, Page, Place
from bough.cache.tree.tokens import num_tokens
from bough.errors import EngineError

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache

HIGH_WATER = 0.9
"""Idle content moves from the device to the host as soon as this share of the budget is used."""


def rest(cache: PrefixCache, session: Session) -> None:
    """Let a session's lane rest, and its path take its new place in the order."""
    now, path, trie = cache.clock(), session.pin.node.path(), session.trie
    reached = session.pin.offset
    session.slot.is_busy = False
    session.slot.last_used = now
    cache.drop_pin(trie, session.pin)
    for node in path:
        node.touch(now)
    _note_use(cache, session, path, now)
    supersede(path)
    thin(cache, trie, path)
    for node in reversed(path):
        cache.evictor.settle(trie, node)
    if cache.tiers is not None and session.stores:
        tokens = session.tokens[:reached].tobytes()
        _promote(cache, session, tokens)
        save(cache, trie, tokens)
        save_parted(cache)
        _demote_ahead(cache)
        memory_of(trie).prune()
        cache.expire()
    if not cache.keeps_on_device:
        cache.room.clear_slot(session.slot)
        while cache.evictor.evict_one():
            pass


def _note_use(cache: PrefixCache, session: Session, path: Sequence[Node], now: float) -> None:
    """Tell the duel of a request and evict by its winner; nodes that are new learn when their first page was here."""
    before: list[float] = []
    page_bytes = cache.costs.row_bytes * cache.page_tokens
    if cache.room.budget_bytes is not None and page_bytes and session.stores:
        capacity = max(0, cache.total_budget_bytes - cache.room.lane_bytes) // page_bytes
        before = cache.duel.note(session.prompt, session.tokens.tobytes(), session.salt, now, capacity)
        cache.evictor.order.use(cache.policy or cache.duel.policy)
    for node in path:
        if node.hits == 1:
            page = node.start // cache.page_tokens
            node.previous_used = before[page] if page < len(before) else NEVER


def _promote(cache: PrefixCache, session: Session, tokens: bytes) -> None:
    """Bring rows of the recorded tokens that lie on the host back to the device: from the lane, which holds them too."""
    if cache.tiers is None or not cache.tiers.has_host or not session.is_whole or cache.room.budget_bytes is None:
        return
    while (found := _next_on_host(session, tokens)) is not None:
        node, page = found
        has_room = _make_way(cache, session, node, page)
        if _next_on_host(session, tokens) != found:
            continue  # making way has changed the path
        if not has_room or not _take_from_lane(session, node, page):
            return
        cache.evictor.offer(session.trie, node)


def _next_on_host(session: Session, tokens: bytes) -> tuple[Node, Page] | None:
    """The first page of these tokens' path that lies on the host, and whose rows the lane holds."""
    end = min(num_tokens(tokens), session.lane.offset)
    for node in session.trie.match(tokens).path:
        for group, pages in node.pages.items():
            start = session.lane.first_row(group) if group.kind is Kind.WINDOW else 0
            for page in pages:
                if page.place is Place.HOST and start <= page.start and page.end <= end:
                    return node, page
    return None


def _make_way(cache: PrefixCache, session: Session, node: Node, page: Page) -> bool:
    """Move what was used longer ago to the host, so that this page fits on the device, and into its salt's share."""
    assert cache.room.budget_bytes is not None
    held_bytes = memory_of(session.trie).num_bytes[Place.DEVICE]
    if held_bytes + page.nbytes > cache.evictor.share_of(cache.room.budget_bytes):
        return False
    while not _is_low(cache, page.nbytes):
        oldest = cache.evictor.order.peek(Place.DEVICE)
        if oldest is None or oldest.node.last_used >= node.last_used or not cache.evictor.move_one_to_host():
            return False
    return True


def _is_low(cache: PrefixCache, extra_bytes: int = 0) -> bool:
    """Whether the device would be used below its high-water mark."""
    assert cache.room.budget_bytes is not None
    return cache.room.used_bytes + extra_bytes <= HIGH_WATER * cache.room.budget_bytes


def _take_from_lane(session: Session, node: Node, page: Page) -> bool:
    """Put rows of the lane into the place of a page on the host; False if there is no memory for them after all."""
    memory = memory_of(session.trie)
    try:
        fresh = memory.take(session.lane.publish(page.group, page.start, page.end))
    except (EngineError, MemoryError):
        return False
    memory.cancel_writes(page)  # they would read what is given back here
    fresh.users, fresh.copies, page.copies = page.users, page.copies, {}
    session.trie.exchange(node, page, fresh)
    memory.release(page)
    return True


def _demote_ahead(cache: PrefixCache) -> None:
    """Move idle content to the host before the device is full, so that the next request finds room."""
    if cache.tiers is None or not cache.tiers.has_host or cache.room.budget_bytes is None:
        return
    while not _is_low(cache) and cache.evictor.move_one_to_host():
        pass
