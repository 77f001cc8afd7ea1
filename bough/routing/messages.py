"""What replicas tell a router of their pages: changes in small batches, and whole listings.

A page is told by its digest: the last element of the digest chain (`Keys.digests`) up to the page's end, under the secret
that all replicas share. So a digest stands for the salt, for all tokens before the page, and for its own.

The incarnation of a replica grows with each start, and is at least 1. Its batches have numbers from 1 on without a gap. A
listing has the number of the last batch before it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from bough.cache.tree.state import Tier

DIGEST_BYTES = 16

_HEADER = struct.Struct("<QQIH")  # incarnation, sequence, number of pages, length of the replica's name
_KIND = struct.Struct("<B")
_BATCH, _LISTING = 1, 2
_GONE, _STANDS = 0, 4


TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers of a replica's own. What lies in a store that all share is no reason to choose one of them."""


@dataclass(frozen=True)
class PageNote:
    """The fastest tier in which a page lies, and whether a lane can be restored at its end.

    A model of full attention alone can be restored anywhere. With other layers, a page `stands` if there is a restore point
    inside the page or at its end.
    """

    tier: Tier
    stands: bool = True


@dataclass(frozen=True)
class Batch:
    """What has changed at one replica: the new notes of pages by their digests; None: the replica dropped the page."""

    replica: str
    incarnation: int
    sequence: int
    changes: Mapping[bytes, PageNote | None]

    def pack(self) -> bytes:
        """The batch as bytes: a header, and 17 bytes for each page."""
        return _pack(_BATCH, self.replica, self.incarnation, self.sequence, self.changes)


@dataclass(frozen=True)
class Listing:
    """All pages of one replica, as they were after the batch with number `sequence`."""

    replica: str
    incarnation: int
    sequence: int
    pages: Mapping[bytes, PageNote]

    def pack(self) -> bytes:
        """The listing as bytes, in the same form as a batch."""
        return _pack(_LISTING, self.replica, self.incarnation, self.sequence, self.pages)


def unpack_message(data: bytes) -> Batch | Listing:
    """Read what `pack` wrote. Raises ValueError, with the numbers, if these bytes are not such a message."""
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
    if kind == _BATCH:
        return Batch(name, incarnation, sequence, notes)
    return Listing(name, incarnation, sequence, {digest: note for digest, note in notes.items() if note is not None})


def _pack(kind: int, replica: str, incarnation: int, sequence: int, notes: Mapping[bytes, PageNote | None]) -> bytes:
    name = replica.encode()
    header = _KIND.pack(kind) + _HEADER.pack(incarnation, sequence, len(notes), len(name))
    return b"".join((header, name, bytes(map(encode_note, notes.values())), *notes))


def encode_note(note: PageNote | None) -> int:
    """A note as a number from 0 to 7: 0 for no page, else 1 + the tier, and 4 more if the page stands."""
    return _GONE if note is None else 1 + note.tier + _STANDS * note.stands


_NOTES: dict[int, PageNote | None] = {_GONE: None} | {
    encode_note(note): note for tier in TIERS for stands in (True, False) for note in [PageNote(tier, stands)]
}


def decode_note(code: int) -> PageNote | None:
    """The note that `encode_note` made this number of."""
    return _NOTES[code]
