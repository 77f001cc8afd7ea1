"""Policies: what may be evicted from a node, in which order, and which of two orders is in force.

The heaps in `order` sort by pure functions of a node and give the smallest. Classes come first: redundant restore points
are evicted before rows, and rows that end in a kept restore point last. The rows that go next of a node are its *tail*: the
last ones, back to a page border. In a tier that has another below it, content is demoted (`tail_items`), wherever its node
is in the tree. Where there is none, it is dropped: a leaf is cut (`tail_start`).

A `Duel` chooses between LRU and LRU-2. It shows every request to two shadows, caches that hold page ids alone and have as
many pages as the tree has room for. The policy whose shadow would have served more lately is in force: LRU as a rule, and
LRU-2 where chats come back more slowly than the cache turns over.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

from bough.cache.tree.node import Hold, Node, Point
from bough.cache.tree.state import Item, Kind, Page, Tier
from bough.tokens import TOKEN_BYTES

DECAY = 0.99
"""What a page that was served counts, one request later."""

SWITCH_RATIO = 1.05
"""The policy in force is replaced when the other's score is larger by this factor."""

GHOST_SHARE = 2
"""Evicted pages are remembered, up to this multiple of the pages that there is room for."""

NEVER = float("-inf")

Key = tuple[float, ...]


class EvictionClass(IntEnum):
    """What would be evicted from a node, the cheapest first."""

    REDUNDANT_POINT = 0
    TAIL = 1
    KEPT_TAIL = 2


def leaf_lru(node: Node) -> Key:
    """Least recently used first; among ties the deepest, then the largest."""
    return (node.last_used, -node.end, -len(node.edge))


def leaf_lru2(node: Node) -> Key:
    """By the use before the last: nodes that were used only once go first. Ties are resolved as in `leaf_lru`."""
    return (node.previous_used, *leaf_lru(node))


@dataclass(frozen=True)
class Policy:
    """An order in which leaves are evicted, the smallest key first; page by page, or each as a whole.

    A key may change only together with a new offer of the node: a use, a hold, a cut.
    """

    key: Callable[[Node], Key]
    is_whole: bool = False

    def step_tokens(self, page_tokens: int) -> int:
        """A leaf is trimmed back to a multiple of this."""
        return sys.maxsize if self.is_whole else page_tokens


LRU = Policy(leaf_lru)
LRU2 = Policy(leaf_lru2)
WHOLE_NODES = Policy(leaf_lru, is_whole=True)


def redundant_point(node: Node) -> Point | None:
    """The restore point of this node that is worth least, if one may be evicted before rows are."""
    adopting = {hold.offset for hold in node.holds if hold.is_adopting}
    points = (point for point in node.points.values() if point.is_redundant and point.offset not in adopting)
    return min(points, key=lambda point: (point.reason, point.offset), default=None)


def tail_start(node: Node, page_tokens: int, *, needs_points: bool, take_kept: bool) -> int:
    """Where a leaf would end without its least valuable tail: at its end if nothing may be cut, at its start if all is.

    A tail reaches back to the last page border; where the model needs restore points, on to the deepest one at or below it,
    because no request can use rows beyond that. Rows that a busy lane stands on stay, and kept points without `take_kept`.
    """
    border = max(node.start, (node.end - 1) // page_tokens * page_tokens)
    if needs_points:
        border = node.deepest_point(border) or node.start
    floor = node.held_here_to
    if not take_kept:
        floor = max(floor, node.deepest_point(node.end, kept=True) or 0)
    return min(node.end, max(border, floor))


def tail_items(
    node: Node,
    tier: Tier,
    page_tokens: int,
    *,
    held_to: int,
    take_kept: bool,
    is_wanted: Callable[[Item], bool],
) -> list[Item]:
    """The items to demote from a tier next: all wanted ones of the last page of this node that has any in that tier.

    Rows below `held_to` stay, because busy lanes stand on them, and so do items that a lane is adopting; kept rows and
    points stay without `take_kept`.
    """
    floor = 0 if take_kept else node.deepest_point(node.end, kept=True) or 0
    end = max(_last_ends(node, tier, floor, held_to, is_wanted), default=0)
    border = (end - 1) // page_tokens * page_tokens
    tail = _tail_to(node, tier, max(floor, border)) if end else ()
    return [item for item in tail if is_wanted(item) and not _is_held(node, item, held_to)]


def _last_ends(
    node: Node, tier: Tier, floor: int, held_to: int, is_wanted: Callable[[Item], bool] = lambda item: True
) -> Iterator[int]:
    """The ends of the last wanted items of each kind in a tier, above `floor`, that may be demoted."""
    for pages in node.pages.values():
        for page in reversed(pages):
            if page.end <= floor or (page.group.kind is Kind.FULL and page.start < held_to):
                break
            if page.tier is tier and is_wanted(page) and not _is_held(node, page, held_to):
                yield page.end
                break
    for point in node.points.values():
        for state in point.states.values():
            if point.offset <= floor or state.tier is not tier or not is_wanted(state):
                continue
            if not _is_held(node, state, held_to):
                yield point.offset


def _tail_to(node: Node, tier: Tier, border: int) -> Iterator[Item]:
    """Items in a tier that end after `border`."""
    for pages in node.pages.values():
        for page in reversed(pages):
            if page.end <= border:
                break
            if page.tier is tier:
                yield page
    for point in node.points.values():
        if point.offset > border:
            yield from (state for state in point.states.values() if state.tier is tier)


def _is_held(node: Node, item: Item, held_to: int) -> bool:
    if not isinstance(item, Page):
        return any(hold.is_adopting and hold.offset == item.offset for hold in node.holds)
    if item.group.kind is Kind.FULL:
        return item.start < held_to
    return any(isinstance(user, Hold) for user in item.users)


def classify_demotion(node: Node, tier: Tier) -> EvictionClass | None:
    """What would be demoted from a tier next, or None if nothing may."""
    point = redundant_point(node)
    if point is not None and any(state.tier is tier for state in point.states.values()):
        return EvictionClass.REDUNDANT_POINT
    if any(_last_ends(node, tier, node.deepest_point(node.end, kept=True) or 0, node.held_here_to)):
        return EvictionClass.TAIL
    return EvictionClass.KEPT_TAIL if any(_last_ends(node, tier, 0, node.held_here_to)) else None


def classify(node: Node, page_tokens: int, *, needs_points: bool) -> EvictionClass | None:
    """What would be dropped from this node next, or None if nothing may."""
    if redundant_point(node) is not None:
        return EvictionClass.REDUNDANT_POINT
    if node.is_root or not node.is_leaf:
        return None
    for take_kept in (False, True):
        if tail_start(node, page_tokens, needs_points=needs_points, take_kept=take_kept) < node.end:
            return EvictionClass.KEPT_TAIL if take_kept else EvictionClass.TAIL
    return None


def is_empty_leaf(node: Node) -> bool:
    """Whether the node is a leaf that holds neither pages nor states."""
    return node.is_leaf and not node.is_root and next(node.items(), None) is None


def classify_files(node: Node) -> EvictionClass | None:
    """What of a node would be evicted from the disk next, or None if nothing may."""
    if not is_empty_leaf(node) and not any(item.files for item in node.items()):
        return None
    return EvictionClass.TAIL if node.deepest_point(node.end, kept=True) is None else EvictionClass.KEPT_TAIL


PageId = bytes
"""Stands for all tokens up to the end of a whole page, so that equal ids mean equal prefixes."""


def page_ids(tokens: bytes, page_tokens: int, salt: str = "") -> list[PageId]:
    """The ids of the whole pages of packed tokens."""
    size, id_, found = page_tokens * TOKEN_BYTES, salt.encode(), []
    for end in range(size, len(tokens) + 1, size):
        id_ = blake2b(id_ + tokens[end - size : end], digest_size=8).digest()
        found.append(id_)
    return found


class LruShadow:
    """Page ids by last use. A path is used as a whole, so that its deepest page is always its oldest: leaves go first."""

    def __init__(self) -> None:
        self.held: OrderedDict[PageId, None] = OrderedDict()

    def use(self, pages: Sequence[PageId], now: float, capacity: int) -> None:
        """Hold these pages of one path, and evict others until no more than `capacity` are left."""
        for page in reversed(pages):
            self.held[page] = None
            self.held.move_to_end(page)
        while len(self.held) > capacity:
            self.held.popitem(last=False)


_Entry = tuple[float, float, int, PageId]
"""Previous use, last use, minus the depth, and the page: in the order in which LRU-2 evicts pages."""


class Lru2Shadow:
    """Page ids by the use before the last, those that never came back first.

    It also remembers when evicted pages were last used, so that the tree can distinguish a return from a first visit.
    """

    def __init__(self) -> None:
        self.held: dict[PageId, _Entry] = {}
        self._order: list[_Entry] = []  # a heap; an entry that `held` does not have any more is stale
        self._ghosts: OrderedDict[PageId, float] = OrderedDict()  # last uses, the first to go first

    def last_used(self, page: PageId) -> float:
        """When a page was last used, as far as is remembered."""
        entry = self.held.get(page)
        return self._ghosts.get(page, NEVER) if entry is None else entry[1]

    def use(self, pages: Sequence[PageId], now: float, capacity: int) -> None:
        """Hold these pages of one path, and evict others until no more than `capacity` are left."""
        for depth, page in enumerate(pages):
            before = self.last_used(page)
            if page not in self.held or before != now:
                self._ghosts.pop(page, None)
                self.held[page] = entry = (before, now, -depth, page)
                heapq.heappush(self._order, entry)
        while len(self.held) > capacity:
            entry = heapq.heappop(self._order)
            _, last_used, _, page = entry
            if self.held.get(page) is entry:
                del self.held[page]
                self._ghosts[page] = last_used
        while len(self._ghosts) > GHOST_SHARE * capacity:
            self._ghosts.popitem(last=False)
        if len(self._order) > 64 and len(self._order) > 4 * len(self.held):
            self._order = sorted(self.held.values())  # sorted, it is a heap


class Duel:
    """Which of LRU and LRU-2 is in force. It begins with LRU."""

    def __init__(self, page_tokens: int) -> None:
        self.policy: Policy = LRU
        self._page_tokens = page_tokens
        self._lru, self._lru2 = LruShadow(), Lru2Shadow()
        self._scores = {LRU: 0.0, LRU2: 0.0}

    def note(self, prompt: bytes, tokens: bytes, salt: str, now: float, capacity: int) -> list[float]:
        """Show the shadows a request that has ended with these tokens; returns when each of their pages was used before.

        `capacity` is how many pages the tree has room for.
        """
        pages = page_ids(tokens, self._page_tokens, salt)
        asked = pages[: len(prompt) // (self._page_tokens * TOKEN_BYTES)]
        before = [self._lru2.last_used(page) for page in pages]
        self._score(LRU, self._lru.held, asked)
        self._score(LRU2, self._lru2.held, asked)
        self._lru.use(pages, now, capacity)
        self._lru2.use(pages, now, capacity)
        other = LRU2 if self.policy is LRU else LRU
        if self._scores[other] > SWITCH_RATIO * self._scores[self.policy]:
            self.policy = other
        return before

    def _score(self, policy: Policy, held: Container[PageId], asked: Sequence[PageId]) -> None:
        served = next((number for number, page in enumerate(asked) if page not in held), len(asked))
        self._scores[policy] = DECAY * self._scores[policy] + served
