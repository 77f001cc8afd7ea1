"""One request's use of the cache: begin → publish, capture → close.

A session owns a busy lane and a pin on the path that it stands on. It keeps the record of what the lane holds; the lane's
state is never ahead of that record, except in the middle of a forward pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from bough.cache.captures import Capture
from bough.cache.tree.node import Pin
from bough.cache.tree.reason import Reason
from bough.cache.tree.state import Kind, Lane, Source
from bough.cache.tree.tokens import cut, num_tokens, unpack
from bough.cache.tree.trie import Trie
from bough.types import Boundary, Loading

if TYPE_CHECKING:
    from bough.cache.prefix_cache import PrefixCache


class ReuseSession(Protocol):
    """What generation needs of a session, whatever remembers: the tree here, simpler strategies in the benchmarks."""

    @property
    def lane(self) -> Lane: ...
    @property
    def matched(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def loading(self) -> Loading: ...
    def schedule(self, offset: int) -> None: ...
    def next_chunk(self, max_tokens: int) -> list[int]: ...
    def feeding(self, ids: Sequence[int]) -> AbstractContextManager[None]: ...
    def publish(self) -> None: ...
    def restart(self) -> None: ...
    def reserve(self, total_tokens: int) -> bool: ...
    def note_prefill(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Reuse(Protocol):
    """Something that remembers: it begins sessions."""

    def begin(
        self,
        ids: Sequence[int],
        *,
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        max_new_tokens: int = 0,
        keep: bool = False,
        store: bool = True,
    ) -> ReuseSession: ...


@dataclass(eq=False)
class Slot:
    """A lane, busy or resting, and what it holds: the tokens, and for whom."""

    lane: Lane
    tokens: bytes = b""
    salt: str = ""
    is_busy: bool = False
    last_used: float = float("-inf")


@dataclass(frozen=True)
class Adoption:
    """A busy lane that stands at `offset`, pinned; `matched` tokens of the prompt were found.

    `is_branch`: the tree goes on otherwise from there than the prompt does.
    """

    slot: Slot
    pin: Pin
    matched: int
    offset: int
    is_branch: bool
    loading: Loading = field(default_factory=Loading)


class Session:
    """A request on its way: prompt tokens to feed, a lane to feed them to, and captures to take on the way."""

    def __init__(
        self, cache: PrefixCache, adoption: Adoption, trie: Trie, salt: str, prompt: bytes, *, stores: bool, keep: bool
    ) -> None:
        self.slot, self.pin = adoption.slot, adoption.pin
        self.matched, self.cached, self.is_branch = adoption.matched, adoption.offset, adoption.is_branch
        self.loading = adoption.loading
        self.cache, self.trie, self.salt, self.prompt = cache, trie, salt, prompt
        self.stores, self.keep = stores, keep
        self.captures: dict[int, Capture] = {}
        self.tokens = array("i", cut(prompt, 0, adoption.offset))
        self.is_whole = True  # False in the middle of a forward pass, and after one that failed
        self.is_closed = False

    @property
    def lane(self) -> Lane:
        return self.slot.lane

    @property
    def offset(self) -> int:
        """Tokens that the lane holds for certain."""
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return num_tokens(self.prompt)

    def schedule(self, offset: int, reason: Reason = Reason.BRANCH, *, kept: bool = False) -> None:
        """Ask for a restore point at `offset`; nothing happens if the lane is beyond it.

        Where the lane stands just now, windows can still be captured after the next run, recurrent states cannot.
        """
        if offset < max(1, self.offset) or not self.stores:
            return
        known = self.captures.get(offset, Capture(offset, reason))
        self.captures[offset] = Capture(offset, max(known.reason, reason), kept or known.kept)

    def next_chunk(self, max_tokens: int) -> list[int]:
        """The prompt tokens to evaluate next; empty when the prompt is done.

        A chunk ends at a scheduled capture only if a recurrent group needs that, else at a page border where it can.
        """
        start, total = self.offset, self.prompt_tokens
        if not self.cache.can_chunk(total):
            return unpack(cut(self.prompt, start))
        end = min(start + max_tokens, total)
        border = end // self.cache.page_tokens * self.cache.page_tokens
        if start < border and end < total:
            end = border
        if any(group.kind is Kind.RECURRENT for group in self.cache.groups):
            end = min((offset for offset in self.captures if start < offset < end), default=end)
        return unpack(cut(self.prompt, start, end))

    @contextmanager
    def feeding(self, ids: Sequence[int]) -> Iterator[None]:
        """The lane is fed `ids` inside this context; if it is left by an error, the lane's groups may disagree."""
        self.is_whole = False
        yield
        self.tokens.extend(ids)
        self.is_whole = True

    def publish(self) -> None:
        """Hand what the lane holds to the tree: others can use it from now on, while this request goes on."""
        assert self.is_whole and not self.is_closed
        self.cache.record(self)

    def restart(self) -> None:
        """Publish what the lane holds, then let it start anew; what it holds from now on is not recorded."""
        self.publish()
        self.stores = False
        self.tokens = array("i")
        self.lane.adopt(0, {group: Source() for group in self.cache.groups})

    def reserve(self, total_tokens: int) -> bool:
        """Make room for a sequence of `total_tokens`; False if the budget does not allow it now."""
        return self.cache.room.reserve(self.slot, total_tokens)

    def note_prefill(self, seconds: float) -> None:
        """Learn from the time that computing the rest of the prompt took, up to its first token."""
        self.cache.rates.note_prefill(self.cached, self.prompt_tokens, seconds)

    def close(self) -> None:
        """Record what was computed, whatever happened, and let the lane rest. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.cache.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
