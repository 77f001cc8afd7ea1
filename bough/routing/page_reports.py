"""Reports of a replica's pages to the routers: changes in small batches, whole listings, and the outbox that makes them.

A page is named by its digest: the last element of the digest chain (`Keys.digests`) up to the page's end, under the secret
that all replicas share. So a digest identifies the salt, all tokens before the page, and its own.

The incarnation of a replica grows with each start, and is at least 1. Its batches have numbers from 1 on without a gap. A
listing has the number of the last batch before it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from bough.cache.tree.state import Tier

DIGEST_BYTES = 16

INTERVAL_S = 0.1
"""The longest that a change waits to be sent: the router counts what it has sent itself meanwhile."""

MOST_CHANGES = 4096
"""A batch of this size is sent before the interval is over."""

_HEADER = struct.Struct("<QQIH")  # incarnation, sequence, number of pages, length of the replica's name
_KIND = struct.Struct("<B")
_BATCH, _LISTING = 1, 2

STANDS = 4
"""The bit of an encoded note for a page that `stands`."""

TIER_BITS = 3
"""The bits of an encoded note with the tier."""

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers of a replica's own. All replicas share the store, so what is there is no reason to choose one of them."""


@dataclass(frozen=True)
class PageNote:
    """The fastest tier that has a page, and whether a lane can be restored at its end.

    A model of full attention alone can be restored anywhere. With other layers, a page `stands` if there is a restore point
    inside the page or at its end.
    """

    tier: Tier
    stands: bool = True


@dataclass(frozen=True)
class PageMessage:
    """A batch of changes at one replica, or a listing: all of its pages, as they were after the batch with this number.

    `notes` are the new notes of pages by their digests; None: the replica dropped the page.
    """

    replica: str
    incarnation: int
    sequence: int
    notes: Mapping[bytes, PageNote | None]
    is_listing: bool = False

    def pack(self) -> bytes:
        """The message as bytes: a header, and 17 bytes for each page."""
        name = self.replica.encode()
        kind = _KIND.pack(_LISTING if self.is_listing else _BATCH)
        header = _HEADER.pack(self.incarnation, self.sequence, len(self.notes), len(name))
        return b"".join((kind, header, name, bytes(map(encode_note, self.notes.values())), *self.notes))


def unpack_message(data: bytes) -> PageMessage:
    """Read what `pack` wrote. Raise ValueError, with the numbers, for any other bytes."""
    start = _KIND.size + _HEADER.size
    if len(data) < start:
        raise ValueError(f"a message of {len(data)} bytes is shorter than its header of {start}")
    (kind,) = _KIND.unpack_from(data)
    incarnation, sequence, num_pages, name_bytes = _HEADER.unpack_from(data, _KIND.size)
    first = start + name_bytes
    if kind not in (_BATCH, _LISTING) or len(data) != first + num_pages * (DIGEST_BYTES + 1):
        raise ValueError(f"a message of kind {kind} with {num_pages} pages does not have {len(data)} bytes")
    name, codes = data[start:first].decode(), data[first : first + num_pages]
    digests = (data[at : at + DIGEST_BYTES] for at in range(first + num_pages, len(data), DIGEST_BYTES))
    notes = {digest: _NOTES[code] for digest, code in zip(digests, codes, strict=True)}
    return PageMessage(name, incarnation, sequence, notes, is_listing=kind == _LISTING)


def encode_note(note: PageNote | None) -> int:
    """A note as a number from 0 to 7: 0 for no page, else 1 + the tier, and 4 more if the page stands."""
    return 0 if note is None else 1 + note.tier + STANDS * note.stands


_NOTES: dict[int, PageNote | None] = {
    encode_note(note): note for note in [None, *(PageNote(tier, stands) for tier in TIERS for stands in (True, False))]
}


class Outbox:
    """The pages of one replica, and the changes that were not sent yet. A page that came and went is never sent."""

    def __init__(self, replica: str, incarnation: int) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._sequence = 0
        self._pages: dict[bytes, PageNote] = {}
        self._sent: dict[bytes, PageNote | None] = {}  # what was last sent of the pages that have changed since
        self._since_s = 0.0  # when the first of these changed

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def note(self, digest: bytes, note: PageNote | None, now: float) -> None:
        """Record that a page was added or moved, or (None) dropped."""
        before = self._pages.get(digest)
        if before == note:
            return
        if not self._sent:
            self._since_s = now
        if self._sent.setdefault(digest, before) == note:
            del self._sent[digest]
        if note is None:
            del self._pages[digest]
        else:
            self._pages[digest] = note

    def is_due(self, now: float) -> bool:
        """Whether a batch should be sent now."""
        return len(self._sent) >= MOST_CHANGES or (bool(self._sent) and now - self._since_s >= INTERVAL_S)

    def take(self) -> PageMessage:
        """The next batch. An empty one serves as a heartbeat, and lets a router notice that one was lost."""
        self._sequence += 1
        changes = {digest: self._pages.get(digest) for digest in self._sent}
        self._sent = {}
        return PageMessage(self._replica, self._incarnation, self._sequence, changes)

    def list_all(self) -> PageMessage:
        """The pages at the last batch, for a router that has missed one. Later changes are sent as usual."""
        pages = {digest: note for digest, note in (self._pages | self._sent).items() if note is not None}
        return PageMessage(self._replica, self._incarnation, self._sequence, pages, is_listing=True)
