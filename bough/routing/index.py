"""The page index: which replica holds which page in which tier, as far as the replicas have told.

One dict for all replicas: a page's key is 60 bits of its digest, and its value has four bits for each replica's slot: the
code of `encode_note`. Digests are keyed hashes, so two pages with one key are as good as impossible, and cost time only.
Most pages are held by one replica; those in the same tier share one value object. So a page takes about 75 bytes.

What is known may be old. A gap in the numbers of batches, or a restart, marks a replica as needing a listing. Until that
comes, what is known goes on being used: a wrong guess costs time, and never a wrong answer.

Forgetting a replica retires its slot at once, and clears the slot's bits page by page in `sweep`.

Always true between calls (`check` asserts it):
- every replica has one slot, and no two have the same; retired and free slots belong to none;
- no page has a value of 0, and no value has bits of a free slot;
- the counts by replica are those of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from bough.routing.messages import Batch, Listing, PageNote, decode_note, encode_note

SLOT_BITS = 4
CODES = (1 << SLOT_BITS) - 1
SWEPT_PAGES = 4096
"""So many pages are swept with each message."""

COMING = 8
"""In the place of a note's code: a request that was sent to this replica will compute the page."""


class Outcome(Enum):
    """What became of a message."""

    APPLIED = auto()
    OLD = auto()  # it tells nothing new
    NEEDS_LISTING = auto()  # it was applied, and something before it is missing
    UNKNOWN = auto()  # there is no such replica


@dataclass
class Known:
    """What is known of one replica besides its pages."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    needs_listing: bool = False
    num_pages: int = 0


@dataclass(slots=True)
class Run:
    """The pages up to `end`, counted from the prompt's start, that one replica holds in one way."""

    end: int
    code: int


class PageIndex:
    """What all replicas hold. Replicas join; then their messages change what is known."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._known: dict[str, Known] = {}
        self._names: dict[int, str] = {}  # by slot
        self._free: list[int] = []
        self._retired: set[int] = set()
        self._num_slots = 0
        self._live = 0  # the bits of all slots that are in use
        self._single: dict[int, int] = {}  # values with one holder, so that equal ones are one object
        self._sweep: _Sweep | None = None

    @property
    def num_pages(self) -> int:
        """How many pages are known, of all replicas together; a page that two hold counts twice."""
        return sum(known.num_pages for known in self._known.values())

    @property
    def num_keys(self) -> int:
        """How many distinct pages take memory."""
        return len(self._pages)

    @property
    def replicas(self) -> Mapping[str, Known]:
        return self._known

    def needing_listing(self) -> list[str]:
        """The replicas that should be asked for a listing."""
        return [name for name, known in self._known.items() if known.needs_listing]

    def join(self, replica: str) -> None:
        """There is a replica of which nothing is known yet, not even its incarnation."""
        if replica not in self._known:
            self._start(replica, 0)

    def apply(self, batch: Batch) -> Outcome:
        """Take up what has changed at a replica, also if a batch before it is missing. Costs O(changes)."""
        known = self._known.get(batch.replica)
        if known is None:
            return Outcome.UNKNOWN
        if (batch.incarnation, batch.sequence) <= (known.incarnation, known.sequence):
            return Outcome.OLD
        if batch.incarnation > known.incarnation:
            known = self._start(batch.replica, batch.incarnation)
            known.needs_listing = True  # it may have come back warm
        elif batch.sequence != known.sequence + 1:
            known.needs_listing = True
        known.sequence = batch.sequence
        for digest, note in batch.changes.items():
            self._set(known, key_of(digest), encode_note(note))
        self.sweep(SWEPT_PAGES)
        return Outcome.NEEDS_LISTING if known.needs_listing else Outcome.APPLIED

    def replace(self, listing: Listing) -> Outcome:
        """Replace what was known of a replica. Costs O(pages of the listing)."""
        known = self._known.get(listing.replica)
        if known is None:
            return Outcome.UNKNOWN
        if (listing.incarnation, listing.sequence) < (known.incarnation, known.sequence):
            return Outcome.OLD
        known = self._start(listing.replica, listing.incarnation)
        known.sequence = listing.sequence
        for digest, note in listing.pages.items():
            self._set(known, key_of(digest), encode_note(note))
        self.sweep(SWEPT_PAGES)
        return Outcome.APPLIED

    def forget(self, replica: str) -> None:
        """A replica is gone for good."""
        known = self._known.pop(replica, None)
        if known is not None:
            self._retired.add(known.slot)
            self._live &= ~(CODES << SLOT_BITS * known.slot)
            del self._names[known.slot]

    def _start(self, replica: str, incarnation: int) -> Known:
        """Begin anew with a replica, in a slot without pages."""
        known = self._known.get(replica)
        if known is not None and not known.num_pages:
            self._known[replica] = Known(known.slot, incarnation)
            return self._known[replica]
        self.forget(replica)
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        slot = self._free.pop()
        self._live |= CODES << SLOT_BITS * slot
        self._names[slot] = replica
        self._known[replica] = Known(slot, incarnation)
        return self._known[replica]

    def _set(self, known: Known, key: int, code: int) -> None:
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
        """Clear up to so many pages of the bits of retired slots. Returns whether there is nothing left to clear."""
        if self._sweep is None:
            if not self._retired:
                return True
            self._sweep = _Sweep(iter(list(self._pages)), frozenset(self._retired))
        for _ in range(most_pages):
            key = next(self._sweep.keys, None)
            if key is None:
                return self._end_sweep(self._sweep)
            self._clean(key)
        return False

    def _clean(self, key: int) -> None:
        value = self._pages.get(key)
        if value is None or not value & ~self._live:
            return
        value &= self._live
        if value:
            self._pages[key] = self._single.get(value, value)
        else:
            del self._pages[key]

    def _end_sweep(self, sweep: _Sweep) -> bool:
        self._retired -= sweep.slots
        self._free.extend(sorted(sweep.slots))
        self._sweep = None
        return not self._retired

    def match(self, keys: Sequence[int], coming: Mapping[int, int]) -> dict[str, list[Run]]:
        """The runs of pages that each replica holds from the prompt's start on, without a gap, by their keys.

        `coming` has the pages that will be computed, as values like those of the index. Costs O(matched pages), and for
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

    def note(self, replica: str, digest: bytes) -> PageNote | None:
        """What is known of one page at one replica."""
        known = self._known.get(replica)
        value = self._pages.get(key_of(digest), 0) & self._live
        return None if known is None else decode_note(value >> SLOT_BITS * known.slot & CODES)

    def check(self) -> None:
        """Assert what the module's docstring says. Costs O(pages)."""
        slots = [known.slot for known in self._known.values()]
        assert {self._names[known.slot]: known.slot for known in self._known.values()} == {
            name: known.slot for name, known in self._known.items()
        }
        assert sorted([*slots, *self._free, *self._retired]) == list(range(self._num_slots))
        assert self._live == sum(CODES << SLOT_BITS * slot for slot in slots)
        free = sum(CODES << SLOT_BITS * slot for slot in self._free)
        counts = dict.fromkeys(slots, 0)
        for value in self._pages.values():
            assert value and not value & free
            for slot, _ in _slots_of(value & self._live):
                counts[slot] += 1
        assert counts == {known.slot: known.num_pages for known in self._known.values()}


@dataclass(frozen=True)
class _Sweep:
    """A sweep under way: the keys that are left of those that there were, and the slots that will be free after it."""

    keys: Iterator[int]
    slots: frozenset[int]


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


def _slots_of(value: int) -> Iterator[tuple[int, int]]:
    """The slots in a value, with their codes. A page that is held and coming is held."""
    while value:
        slot = ((value & -value).bit_length() - 1) // SLOT_BITS
        code = value >> SLOT_BITS * slot & CODES
        value &= ~(CODES << SLOT_BITS * slot)
        yield slot, code & (COMING - 1) or COMING
