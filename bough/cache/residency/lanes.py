"""Lanes: which of them are busy, and what the idle ones still hold.

An idle lane protects nothing from eviction, and is cleared first when memory is short: as a rule the tree has what it has.
A lane that shares rows with the tree takes no memory for those; it is cleared when the tree has dropped them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bough.cache.residency.memory import SaltTrie
from bough.cache.store import StorePath
from bough.cache.tree.address import PageBorder
from bough.cache.tree.node import Hold
from bough.cache.tree.state import Group, Lane, Page, Range, RowSpan, page_ranges
from bough.errors import LanesBusy


class LaneSlot:
    """A lane, busy or idle. `tokens` and `salt` say what an idle lane holds, and a busy one as long as it is not touched.

    `version` grows with every change of what can be reused from here.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.salt = ""
        self.tokens = b""
        self.is_busy = False
        self.last_used = float("-inf")
        self.version = 0

    def occupy(self) -> None:
        self.is_busy = True
        self.version += 1

    def free(self) -> None:
        """Make the lane idle; it keeps what `tokens` say."""
        self.is_busy = False
        self.version += 1

    def clear(self) -> None:
        """Empty the lane and give its memory back."""
        self.tokens = b""  # first: what follows may fail
        self.version += 1
        self.lane.clear()


class Lanes:
    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.slots = [LaneSlot(lane) for lane in lanes]

    @property
    def nbytes(self) -> int:
        """Memory of all lanes, without the blocks that they share with the tree."""
        return sum(slot.lane.nbytes for slot in self.slots)

    @property
    def version(self) -> int:
        """Grows with every change of what the idle lanes hold."""
        return sum(slot.version for slot in self.slots)

    @property
    def num_busy(self) -> int:
        return sum(slot.is_busy for slot in self.slots)

    def idle(self) -> list[LaneSlot]:
        """The lanes that can serve a request, least recently used first."""
        return sorted((slot for slot in self.slots if not slot.is_busy), key=lambda slot: slot.last_used)

    def require_idle(self) -> list[LaneSlot]:
        """The same; raise LanesBusy if there is none."""
        slots = self.idle()
        if not slots:
            raise LanesBusy(len(self.slots))
        return slots

    def clear_oldest_idle(self, spare: LaneSlot | None = None, *, is_sharing: bool = False) -> bool:
        """Clear the idle lane that was used longest ago and holds memory; False if there is none but `spare`.

        With `is_sharing`, only lanes that share rows with the tree count.
        """
        for slot in self.idle():
            if slot is not spare and (slot.lane.shares_rows or not is_sharing) and slot.lane.nbytes:
                slot.clear()
                return True
        return False


@dataclass(eq=False)
class LiveSequence:
    """The content of a busy lane: the tokens of its request so far, and its hold, up to which the tree has them too.

    The lane has room for `total_tokens`. Of the first `filled_to` tokens the tree has everything in memory that the lane
    could give it. The next chunk hands the pages from `saved_to` on to the disk; it is None until the first one finds out
    where that is. The first `num_shared` pages of its `store_path` were handed to the shared store.
    """

    slot: LaneSlot
    trie: SaltTrie
    hold: Hold
    tokens: array[int]
    total_tokens: int
    filled_to: int = 0
    saved_to: PageBorder | None = None
    store_path: StorePath | None = None
    num_shared: int = 0

    @property
    def lane(self) -> Lane:
        return self.slot.lane

    @property
    def offset(self) -> int:
        """Tokens that the lane holds for certain, also after a forward pass that failed."""
        return len(self.tokens)

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """The tokens [start, end), packed."""
        return self.tokens[start:end].tobytes()

    def spans(self, group: Group, start: int, end: int) -> Iterator[RowSpan]:
        """Rows [start, end) of the lane as they can be published: cut at page borders and between blocks."""
        for low, high in page_ranges(start, end, self.trie.page_tokens):
            yield from self.lane.spans(group, low, high)

    def publish(self, group: Group, start: int, end: int) -> Iterator[Page]:
        """Pages of these rows; each is made, and counted for the tree, when it is asked for."""
        for span in self.spans(group, start, end):
            yield self.trie.memory.add(self.lane.publish(group, span.start, span.end))

    def new_block_bytes(self, rows: Mapping[Group, Sequence[Range]]) -> int:
        """Bytes of the blocks with these rows of the lane that hold no page of its trie yet."""
        spans = (span for group, ranges in rows.items() for low, high in ranges for span in self.spans(group, low, high))
        memory = self.trie.memory
        blocks = {span.block for span in spans if span.block is not None and not memory.has_pages_in(span.block)}
        return sum(block.nbytes for block in blocks)
