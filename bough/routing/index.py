"""The page index: which replica holds which page in which tier, as the replicas have reported.

One dict for all replicas: a page's key is 60 bits of its digest, and its value has four bits for each replica's slot: the
code of `encode_note`. Digests are keyed hashes, so two pages almost never share a key; if they do, it costs only time.
Most pages are held by one replica; those in the same tier share one value object. So a page takes about 75 bytes.

The index may be out of date. A gap in the numbers of batches, or a restart, marks a replica as needing a listing. Until
that comes, the old content is used: a wrong guess costs time, and never gives a wrong answer.

Forgetting a replica retires its slot at once, and clears the slot's bits page by page in `sweep`.

Always true between calls (`check` asserts it):
- every replica has one slot, and no two have the same; retired and free slots belong to none;
- no page has a value of 0, and no value has bits of a free slot;
- the counts by replica are those of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from bough.routing.page_reports import PageMessage, encode_note

SLOT_BITS = 4
CODES = (1 << SLOT_BITS) - 1
SWEPT_PAGES = 4096
"""How many pages are swept with each message."""

COMING = 8
"""Instead of a note's code: a request that was sent to this replica will compute the page."""


@dataclass
class ReplicaState:
    """A replica's slot and the last message that was applied."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    needs_listing: bool = False
    num_pages: int = 0


@dataclass(slots=True)
class Run:
    """The pages before `end`, counted from the prompt's start, that one replica holds with the same code."""

    end: int
    code: int


class PageIndex:
    """The pages that all replicas hold. Replicas join, then their messages are applied."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._known: dict[str, ReplicaState] = {}
        self._names: dict[int, str] = {}  # by slot
        self._free: list[int] = []
        self._retired: set[int] = set()
        self._num_slots = 0
        self._live = 0  # the bits of all slots that are in use
        self._single: dict[int, int] = {}  # values with one holder, so that equal ones are one object
        self._sweep: Iterator[None] | None = None  # the one under way

    @property
    def num_pages(self) -> int:
        """The pages of all replicas together; a page that two hold counts twice."""
        return sum(known.num_pages for known in self._known.values())

    @property
    def num_keys(self) -> int:
        """The distinct pages."""
        return len(self._pages)

    @property
    def replicas(self) -> Mapping[str, ReplicaState]:
        return self._known

    def count_bytes(self, size_of: Callable[[object], int]) -> int:
        """The memory that pages take; `size_of` returns the bytes of one object. Costs O(pages)."""
        values = {id(value): value for value in self._pages.values()}
        return sum(map(size_of, [self._pages, *self._pages, *values.values()]))

    def join(self, replica: str) -> None:
        """Add a replica of which nothing is known yet, not even its incarnation."""
        if replica not in self._known:
            self._start(replica, 0)

    def apply(self, message: PageMessage) -> bool:
        """Apply a message, even if one before it is missing; returns whether the replica has to send a listing.

        A message of an unknown replica is ignored, and so is one that is older than what was applied. Costs O(its pages).
        """
        known = self._known.get(message.replica)
        if known is None:
            return False
        sent, last = (message.incarnation, message.sequence), (known.incarnation, known.sequence)
        if sent < last or (sent == last and not message.is_listing):
            return False
        if message.is_listing or message.incarnation > known.incarnation:
            known = self._start(message.replica, message.incarnation)
            known.needs_listing = not message.is_listing  # it may have found its tree on disk
        elif message.sequence != known.sequence + 1:
            known.needs_listing = True
        known.sequence = message.sequence
        for digest, note in message.notes.items():
            self._set(known, key_of(digest), encode_note(note))
        self.sweep(SWEPT_PAGES)
        return known.needs_listing

    def forget(self, replica: str) -> None:
        """Remove a replica that is gone for good."""
        known = self._known.pop(replica, None)
        if known is not None:
            self._retired.add(known.slot)
            self._live &= ~(CODES << SLOT_BITS * known.slot)
            del self._names[known.slot]

    def _start(self, replica: str, incarnation: int) -> ReplicaState:
        """Give a replica a slot without pages."""
        known = self._known.get(replica)
        if known is not None and not known.num_pages:
            self._known[replica] = ReplicaState(known.slot, incarnation)
            return self._known[replica]
        self.forget(replica)
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        slot = self._free.pop()
        self._live |= CODES << SLOT_BITS * slot
        self._names[slot] = replica
        self._known[replica] = ReplicaState(slot, incarnation)
        return self._known[replica]

    def _set(self, known: ReplicaState, key: int, code: int) -> None:
        shift = SLOT_BITS * known.slot
        before = self._pages.get(key, 0) & self._live
        known.num_pages += bool(code) - bool(before >> shift & CODES)
        value = before & ~(CODES << shift) | code << shift
        if value:
            others = value & ~(CODES << shift)
            self._pages[key] = value if others else self._single.setdefault(value, value)
        else:
            self._pages.pop(key, None)

    def sweep(self, most_pages: int) -> bool:
        """Clear the bits of retired slots in up to `most_pages` pages; returns whether none are left to clear."""
        if self._sweep is None:
            self._sweep = self._clear_retired()
        for _ in islice(self._sweep, most_pages):
            pass
        return not self._retired

    def _clear_retired(self) -> Iterator[None]:
        """Clear the bits of the slots that are retired now, one page a step; then free these slots."""
        slots = frozenset(self._retired)
        for key in list(self._pages) if slots else ():
            value = self._pages.get(key, 0)
            if value & ~self._live:
                value &= self._live
                if value:
                    self._pages[key] = self._single.get(value, value)
                else:
                    del self._pages[key]
            yield
        self._retired -= slots
        self._free.extend(sorted(slots))
        self._sweep = None

    def match(self, keys: Sequence[int], coming: Mapping[int, int]) -> dict[str, list[Run]]:
        """The runs of pages, by replica, that it holds from the prompt's start on without a gap.

        `coming` has the pages that will be computed, with values like those of the index. Costs O(matched pages), and for
        each run of pages that the same replicas hold O(these replicas).
        """
        runs: dict[int, list[Run]] = {}
        pages, live, start, before = self._pages, self._live, 0, 0
        for at, key in enumerate(keys):
            value = pages.get(key, 0)
            if coming:
                value |= coming.get(key, 0)
            if value != before:
                _extend(runs, before & live, start, at)
                start, before = at, value
            if not value:
                break
        else:
            _extend(runs, before & live, start, len(keys))
        return {self._names[slot]: found for slot, found in runs.items()}

    def check(self) -> None:
        """Assert what the module's docstring says. Costs O(pages)."""
        slots = [known.slot for known in self._known.values()]
        assert self._names == {known.slot: name for name, known in self._known.items()}
        assert sorted([*slots, *self._free, *self._retired]) == list(range(self._num_slots))
        assert self._live == sum(CODES << SLOT_BITS * slot for slot in slots)
        free = sum(CODES << SLOT_BITS * slot for slot in self._free)
        counts = dict.fromkeys(slots, 0)
        for value in self._pages.values():
            assert value and not value & free
            for slot, _ in _slots_of(value & self._live):
                counts[slot] += 1
        assert counts == {known.slot: known.num_pages for known in self._known.values()}


def key_of(digest: bytes) -> int:
    """The key of a page: 60 bits of its digest, which fit the smallest integer object that is larger than 30 bits."""
    return int.from_bytes(digest[:8], "little") >> 4


def _extend(runs: dict[int, list[Run]], value: int, start: int, end: int) -> None:
    """Add the pages [start, end) to the replicas that hold them and all pages before."""
    if start == end:
        return
    for slot, code in _slots_of(value):
        found = runs.get(slot)
        if found is None:
            if start == 0:
                runs[slot] = [Run(end, code)]
        elif found[-1].end == start:
            if found[-1].code == code:
                found[-1].end = end
            else:
                found.append(Run(end, code))


@lru_cache(maxsize=4096)
def _slots_of(value: int) -> tuple[tuple[int, int], ...]:
    """The slots in a value, with their codes. A page that is held and coming is held. Few values are in use at a time."""
    found = []
    while value:
        slot = ((value & -value).bit_length() - 1) // SLOT_BITS
        code = value >> SLOT_BITS * slot & CODES
        value &= ~(CODES << SLOT_BITS * slot)
        found.append((slot, code & (COMING - 1) or COMING))
    return tuple(found)
