"""Shadows: caches that hold page ids alone, and the duel between two policies that is fought on them.

Both shadows see every request and have as many pages as the tree has room for. The policy whose shadow would have served
more lately is in force: recency as a rule, and, where chats come back more slowly than the cache turns over, LRU-2. The
shadow of LRU-2 also remembers when evicted pages were last used, so that the tree can tell a return from a first
visit.

A page id stands for all tokens up to the page's end, so that equal ids mean equal prefixes. Only whole pages have one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Sequence
from hashlib import blake2b

from bough.cache.residency.policy import LRU, LRU2, Policy
from bough.cache.tree.tokens import TOKEN_BYTES

DECAY = 0.99
"""What a page that was served counts, one request later."""

SWITCH_RATIO = 1.05
"""The policy in force is replaced when the other's score is larger by this factor."""

GHOST_SHARE = 2
"""Evicted pages are remembered, up to so many times as many as there is room for."""

NEVER = float("-inf")

PageId = bytes


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
"""Previous use, last use, minus the depth, and whose: in the order in which LRU-2 evicts pages."""


class Lru2Shadow:
    """Page ids by the use before the last, those that never came back first; and when those that went were last used."""

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
        self._shrink(capacity)

    def _shrink(self, capacity: int) -> None:
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
        self._choose_policy()
        return before

    def _score(self, policy: Policy, held: Container[PageId], asked: Sequence[PageId]) -> None:
        served = next((number for number, page in enumerate(asked) if page not in held), len(asked))
        self._scores[policy] = DECAY * self._scores[policy] + served

    def _choose_policy(self) -> None:
        other = LRU2 if self.policy is LRU else LRU
        if self._scores[other] > SWITCH_RATIO * self._scores[self.policy]:
            self.policy = other
