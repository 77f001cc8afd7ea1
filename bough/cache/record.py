"""Recording: the tree takes over what a session's lane holds.

All functions work at the session's pin, which stands where the tree's knowledge of the session's tokens ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from bough.cache.captures import Capture
from bough.cache.residency.evictor import memory_of
from bough.cache.session import Session
from bough.cache.tree.node import Node
from bough.cache.tree.reason import Reason
from bough.cache.tree.state import Group, Kind, Page
from bough.cache.tree.trie import Trie

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


def fit(cache: PrefixCache, session: Session, end: int, due: list[Capture]) -> tuple[int, list[Capture]]:
    """Make room for rows and captures. If not all fit, the least worthy captures are given up, then rows.

    Rows without a restore point serve nobody in a model that needs those: room for one is counted in.
    """
    at, kept = session.pin.offset, sorted(due, key=lambda capture: capture.worth)
    rows = (end - at) * cache.costs.row_bytes
    while True:
        offsets = {capture.offset for capture in kept} | ({end} if cache.costs.needs_points else set())
        if cache.room.make(rows + cache.costs.total_bytes(offsets), spare=session.slot, trie=session.trie):
            return end, kept
        if not kept or offsets == {end}:
            return _fit_less(cache, session, at, end)
        kept.pop(0)


def _fit_less(cache: PrefixCache, session: Session, at: int, end: int) -> tuple[int, list[Capture]]:
    """As many whole pages as fit, with a restore point at their end where one is needed and can still be made."""
    costs, room = cache.costs, cache.room
    if not costs.row_bytes or any(group.kind is Kind.RECURRENT for group in cache.groups):
        return at, []
    fitting = (room.affordable(session.trie) - costs.point_bytes(end)) // costs.row_bytes
    less = max(at, min(end, at + fitting) // cache.page_tokens * cache.page_tokens)
    if not less or not all(holds_window(session, group, less) for group in cache.groups):
        return at, []
    needed_bytes = (less - at) * costs.row_bytes + costs.point_bytes(less)
    if not room.make(needed_bytes, spare=session.slot, trie=session.trie):
        return at, []
    return less, [Capture(less, Reason.END)] if costs.needs_points else []


def extend(cache: PrefixCache, session: Session, end: int) -> None:
    """Add the tokens from the pin up to `end` to the tree, with their rows, and move the pin there."""
    start = session.pin.offset
    if start >= end:
        return
    nbytes = (end - start) * cache.costs.row_bytes
    pages = cache.room.insist(lambda: _publish(cache, session, start, end), nbytes, session.slot)  # first: it may fail
    try:
        node = _place(cache, session, start, end)
    except BaseException:
        for page in pages:
            session.trie.store.release(page)
        raise
    for page in pages:
        session.trie.hold(node, page)
    cache.move_pin(session.trie, session.pin, node, end)


def _place(cache: PrefixCache, session: Session, start: int, end: int) -> Node:
    """The node whose edge ends with the tokens [start, end): a leaf that grew, or a new child."""
    trie, node, tokens = session.trie, session.pin.node, session.tokens[start:end].tobytes()
    if start == node.end and node.is_leaf and not node.is_root:
        trie.grow(node, tokens)
        return node
    if start < node.end:
        tail, node = node, trie.split(node, start)
        cache.evictor.offer(trie, tail)
        if cache.memory.disk is not None:
            cache.parted.append((trie, tail))
    return trie.append(node, tokens, node.last_used)


def _publish(cache: PrefixCache, session: Session, start: int, end: int) -> list[Page]:
    """Pages of all full-attention rows in [start, end); if one fails, those made before it are released."""
    pages: list[Page] = []
    try:
        for group in _full(cache):
            for low, high in page_ranges(start, end, cache.page_tokens):
                pages.append(memory_of(session.trie).take(session.lane.publish(group, low, high)))
    except BaseException:
        for page in pages:
            session.trie.store.release(page)
        raise
    return pages


def page_ranges(start: int, end: int, page_tokens: int) -> list[tuple[int, int]]:
    """[start, end) cut at page borders; nothing if it is empty."""
    if start >= end:
        return []
    borders = range((start // page_tokens + 1) * page_tokens, end, page_tokens)
    edges = [start, *borders, end]
    return list(pairwise(edges))


def fill_holes(cache: PrefixCache, session: Session) -> None:
    """Publish the rows that nodes on the path have lost to a failed load, as far as the lane holds them and they fit."""
    if not any(node.has_holes for node in session.pin.node.path()):
        return
    needed = sum((high - low) * group.bytes_per_token for _, group, low, high in _holes(cache, session))
    if not cache.room.make(needed, spare=session.slot, trie=session.trie):
        return
    for node, group, low, high in _holes(cache, session):  # again: making room may have merged nodes
        session.trie.hold(node, memory_of(session.trie).take(session.lane.publish(group, low, high)))
    for node in session.pin.node.path():
        node.has_holes = any(
            list(node.missing_between(group, node.start, node.end, cache.page_tokens)) for group in _full(cache)
        )


def _holes(cache: PrefixCache, session: Session) -> list[tuple[Node, Group, int, int]]:
    return [
        (node, group, low, high)
        for node in session.pin.node.path()
        if node.has_holes
        for group in _full(cache)
        for low, high in node.missing_between(group, node.start, session.pin.offset, cache.page_tokens)
    ]


def _full(cache: PrefixCache) -> list[Group]:
    return [group for group in cache.groups if group.kind is Kind.FULL]


def attach_captures(cache: PrefixCache, session: Session, due: Sequence[Capture]) -> None:
    """Make the restore points that are due, where the lane still holds what they need."""
    for capture in due:
        node = session.pin.node
        while capture.offset <= node.start:
            assert node.parent is not None
            node = node.parent
        if _can_capture(cache, session, node, capture.offset):
            _attach(cache, session, node, capture)


def _can_capture(cache: PrefixCache, session: Session, node: Node, offset: int) -> bool:
    if offset > session.pin.offset:
        return False
    known = node.points.get(offset)
    for group in cache.groups:
        if group.kind is Kind.RECURRENT and not (known and group in known.states) and session.lane.offset != offset:
            return False
        if group.kind is Kind.WINDOW and not _holds_window(cache, session, node, group, offset):
            return False
    return True


def holds_window(session: Session, group: Group, offset: int) -> bool:
    """Whether the lane itself holds the rows that restoring a row group at `offset` needs."""
    return session.lane.first_row(group) <= group.first_needed(offset)


def _holds_window(cache: PrefixCache, session: Session, node: Node, group: Group, offset: int) -> bool:
    """Whether lane and tree together hold the rows that restoring a window group at `offset` needs."""
    start, held_from = group.first_needed(offset), session.lane.first_row(group)
    at: Node | None = node
    while held_from > start and at is not None and at.end > start:
        missing = at.missing_between(group, start, offset, cache.page_tokens)
        if any(low < held_from for low, _ in missing):
            return False
        at = at.parent
    return True


def _attach(cache: PrefixCache, session: Session, node: Node, capture: Capture) -> None:
    """Make a restore point with all it needs, or none."""
    trie, lane, memory = session.trie, session.lane, memory_of(session.trie)
    is_new = capture.offset not in node.points
    point = trie.add_point(node, capture.offset, capture.reason, kept=capture.kept)
    try:
        for group in cache.groups:
            if group.kind is Kind.RECURRENT and group not in point.states:
                point.states[group] = memory.take(lane.capture(group))
            elif group.kind is Kind.WINDOW:
                trie.hold_window(node, point, group, lambda g, low, high: memory.take(lane.publish(g, low, high)))
    except BaseException:
        if is_new:
            trie.drop_point(node, point)
        raise
    cache.evictor.offer(trie, node)


def supersede(path: Sequence[Node]) -> None:
    """Mark the points of a path whose role a deeper one has taken; where paths part, they are branch points instead."""
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


def thin(cache: PrefixCache, trie: Trie, path: Sequence[Node]) -> None:
    """Drop the redundant points of a path that are beyond their share of its row bytes, the shallowest first."""
    allowance = cache.costs.redundant_allowance(path[-1].end if path else 0)
    places = [(node, point) for node in path for point in node.points.values() if point.is_redundant]
    places.sort(key=lambda place: (place[1].reason, place[1].offset), reverse=True)
    for node, point in places:
        allowance -= cache.costs.point_bytes(point.offset)
        is_adopting = any(pin.is_adopting and pin.offset == point.offset for pin in node.pins)
        if allowance < 0 and not is_adopting:
            trie.drop_point(node, point)
