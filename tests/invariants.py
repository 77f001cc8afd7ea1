"""What must hold after every step, over the cache, the fake engine and its lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import LaneSlot, SaltTrie
from bough.cache.residency.memory import memory_bytes
from bough.cache.session import Session
from bough.cache.tree.node import Node
from bough.cache.tree.state import Group, Kind, Tier
from bough.tokens import unpack
from tests.fake_pool import PooledFakeEngine, PooledFakeLane
from tests.fakes import FakeEngine, FakeLane


def check(cache: PrefixCache, engine: FakeEngine, sessions: Iterable[Session] = ()) -> None:
    """The tree's own check, content against tokens, ownership, and live state against what was fed.

    All nodes are recorded at the end, so that the next check finds a record that should have been noted as out of date.
    """
    cache.check()
    for _ in cache.memory.census.update():
        pass
    held = []
    for trie in cache.forest.tries.values():
        _check_account(trie)
        for node in trie.walk():
            held += _check_content(node, engine)
    assert len(held) == len(set(held)), "owned twice"
    assert set(held) == engine.live, "leaked, or owned after release"
    _check_arena(cache, engine)
    for slot in cache.lanes.slots:
        if not slot.is_busy and slot.tokens:
            _check_lane(slot.lane, unpack(slot.tokens))
    for session in sessions:
        if session.is_whole and not session.is_closed and not session.is_loading:
            _check_lane(session.lane, session.tokens.tolist())


class _Position(NamedTuple):
    """The position of a node in the forest, and what identifies its content."""

    trie: SaltTrie
    parent: Node | None
    start: int
    edge: bytes
    content: frozenset[object]


def _positions(cache: PrefixCache) -> dict[Node, _Position]:
    return {
        node: _Position(trie, node.parent, node.start, node.edge, frozenset((*node.items(), *node.points.values())))
        for trie in cache.forest.tries.values()
        for node in trie.walk()
    }


def check_only_dropped(before: dict[Node, _Position], cache: PrefixCache) -> None:
    """Assert that nodes were only trimmed or removed since then: whatever still has content is the same object, there."""
    after = _positions(cache)
    assert after.keys() <= before.keys(), "making room has added a node"
    for node, now in after.items():
        then = before[node]
        assert (now.trie, now.parent, now.start) == (then.trie, then.parent, then.start), "making room has moved a node"
        assert then.edge.startswith(now.edge) and (now.edge == then.edge or node.is_leaf)
        assert node.is_root or now.trie.has(node)
    left = frozenset[object]().union(*(now.content for now in after.values()))
    for node in before.keys() - after.keys():
        assert not before[node].content & left, "a node has gone whose content is still there"


def watch_evictions(cache: PrefixCache) -> None:
    """Have every eviction checked from now on, and the tries after it, however it comes about."""
    evictor: Any = cache.residency.evictor
    for name in ("evict_one", "demote_one"):
        setattr(evictor, name, _checked(getattr(evictor, name), cache))


def _checked(evict: Callable[..., bool], cache: PrefixCache) -> Callable[..., bool]:
    def checked(*args: Any, **kwargs: Any) -> bool:
        before = _positions(cache)
        try:
            return evict(*args, **kwargs)
        finally:
            check_only_dropped(before, cache)
            for trie in cache.forest.tries.values():
                trie.check()

    return checked


def _check_account(trie: SaltTrie) -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        items = [item for node in trie.walk() for item in node.items() if item.tier is tier]
        assert trie.memory.num_bytes[tier] == memory_bytes(items)


def _check_content(node: Node, engine: FakeEngine) -> list[object]:
    path = [token for each in node.path() for token in unpack(each.edge)]
    items: list[object] = []
    for pages in node.pages.values():
        for page in pages:
            if page.tier is not Tier.DISK:
                assert list(engine.content(page)) == path[page.start : page.end], "a page of other tokens"
                items.append(page)
    for point in node.points.values():
        for state in point.states.values():
            if state.tier is not Tier.DISK:
                assert list(engine.content(state)) == path[: point.offset], "a state of other tokens"
                items.append(state)
    return items


def _check_arena(cache: PrefixCache, engine: FakeEngine) -> None:
    """Each slot that is used is counted once: for the tree, or for a lane."""
    if isinstance(engine, PooledFakeEngine):
        engine.arena.check()
        lanes = [slot.lane for slot in cache.lanes.slots]
        assert cache.memory.tree_bytes + sum(lane.nbytes - lane.own_bytes for lane in lanes) == engine.arena.held_bytes


def _check_lane(lane: object, tokens: list[int]) -> None:
    assert isinstance(lane, FakeLane | PooledFakeLane)
    assert lane.offset == len(tokens)
    for first, rows in lane.held.values():
        assert rows == tokens[first:], "live state is not what was fed"


def reusable(cache: PrefixCache, prompt: list[int], salt: str = "") -> int:
    """By brute force: the deepest offset below the prompt's end that the tree and any one idle lane could restore."""
    found = cache.forest.find(salt).match(prompt)
    path, matched = found.path, found.length
    rows = {
        group: {row for node in path for page in node.pages.get(group, []) for row in range(page.start, page.end)}
        for group in cache.memory.groups
    }
    return max(_deepest(cache, slot, prompt, salt, path, rows, matched) for slot in cache.lanes.slots if not slot.is_busy)


def _deepest(
    cache: PrefixCache,
    slot: LaneSlot,
    prompt: list[int],
    salt: str,
    path: list[Node],
    rows: dict[Group, set[int]],
    matched: int,
) -> int:
    live = unpack(slot.tokens) if slot.salt == salt else []
    shared = next((i for i, (a, b) in enumerate(zip(live, prompt, strict=False)) if a != b), min(len(live), len(prompt)))
    tree = {group: {row for row in held if row < matched} for group, held in rows.items()}

    def can_stand(group: Group, offset: int) -> bool:
        if group.kind is Kind.RECURRENT:
            in_tree = any(offset in node.points and group in node.points[offset].states for node in path)
            return (in_tree and offset <= matched) or offset == shared == len(live)
        needed = set(range(group.first_needed(offset), offset))
        own = set(range(slot.lane.first_row(group), shared))
        return needed <= (tree[group] | own) if group.kind is Kind.FULL else needed <= tree[group] or needed <= own

    limit = min(max(matched, shared), len(prompt) - 1)
    return next((at for at in range(limit, 0, -1) if all(can_stand(group, at) for group in cache.memory.groups)), 0)
