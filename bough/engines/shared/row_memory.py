"""The memory for the rows of a group on one lane: how large a buffer is and when it grows, without any tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from bough.cache.tree.state import PAGE_TOKENS, Group, Incoming, Kind


@dataclass(frozen=True)
class LaneSizes:
    """How large a lane may grow: `context` is the most tokens of a sequence.

    `slack` is the number of rows that a window buffer has beyond its window: the longest run of a chunked prompt.
    """

    context: int
    slack: int


class RowMemory(ABC):
    """A buffer for rows [base, base + capacity); the lane knows which of them are filled. An engine adds the tensors.

    A full buffer starts at row 0 and grows with the sequence. A window buffer has room for the window and `slack` rows
    more; when it is full, the rows that are still needed are shifted down to its start. Only a single run of more than
    `slack` tokens makes it grow beyond that. A buffer that was never reserved, or was freed, occupies nothing.
    """

    def __init__(self, group: Group, sizes: LaneSizes) -> None:
        self.group = group
        self.base = 0
        self.capacity = 0
        self._sizes = sizes

    @property
    def nbytes(self) -> int:
        return self.capacity * self.group.bytes_per_token

    def bytes_for(self, num_tokens: int, offset: int, incoming: Incoming | None = None) -> int:
        return self._capacity_for(num_tokens, offset) * self.group.bytes_per_token

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self._fresh_capacity(num_tokens) * self.group.bytes_per_token

    def moved_bytes(self, num_tokens: int, offset: int) -> int:
        """The size of the old buffer beside the new one while room for rows [0, num_tokens) is made."""
        return self.nbytes if offset and self._capacity_for(num_tokens, offset) != self.capacity else 0

    def reserve(self, num_tokens: int, offset: int, incoming: Incoming | None = None) -> None:
        capacity = self._capacity_for(num_tokens, offset)
        if capacity != self.capacity:
            self._resize(capacity, self.base, offset)

    def has_room_for(self, offset: int, num_tokens: int) -> bool:
        """Whether a run fits without anything being moved."""
        return offset - self.base + num_tokens <= self.capacity

    def make_room(self, offset: int, num_tokens: int) -> None:
        """Make room for the rows of a run; a window drops the rows that a lane at `offset` no longer needs."""
        if self.has_room_for(offset, num_tokens):
            return
        assert self.group.kind is Kind.WINDOW, (
            f"no room for {num_tokens} rows at {offset}: reserve {self.capacity} was too little"
        )
        first = self.group.first_needed(offset)
        if offset - first + num_tokens > self.capacity:
            self._resize(whole_pages(offset - first + num_tokens), first, offset)
        else:
            self._shift(first, offset)
            self.base = first

    def free(self) -> None:
        self.base = self.capacity = 0
        self._drop()

    def _capacity_for(self, num_tokens: int, offset: int) -> int:
        if self.group.kind is Kind.WINDOW:
            return max(self.capacity, self._fresh_capacity(num_tokens))
        if num_tokens <= self.capacity:
            return self.capacity
        wanted = self._fresh_capacity(num_tokens)
        if offset:  # the live rows must be moved: grow enough that this is rare
            wanted = max(wanted, min(whole_pages(self.capacity * 3 // 2), self._sizes.context))
        return wanted

    def _fresh_capacity(self, num_tokens: int) -> int:
        if self.group.kind is Kind.WINDOW:
            return whole_pages(min(num_tokens, self.group.window - 1 + self._sizes.slack))
        return max(num_tokens, min(whole_pages(num_tokens), self._sizes.context))

    @abstractmethod
    def _resize(self, capacity: int, first: int, offset: int) -> None:
        """Allocate memory for `capacity` rows from row `first` on, and move the live ones [first, offset) there."""

    @abstractmethod
    def _shift(self, first: int, offset: int) -> None:
        """Move the live rows [first, offset) to the start of the same memory."""

    @abstractmethod
    def _drop(self) -> None:
        """Release the memory."""


def whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS
