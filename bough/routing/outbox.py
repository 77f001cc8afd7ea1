"""What a replica has to tell the router: changes are collected, and sent in small batches."""

from __future__ import annotations

from bough.routing.messages import Batch, Listing, PageNote

INTERVAL_S = 0.1
"""A change waits so long at most: the router counts what it has sent itself meanwhile."""

MOST_CHANGES = 4096
"""So many changes are sent at once, also before the interval is over."""


class Outbox:
    """Knows what one replica holds, and what the router was not told yet. A page that came and went is not told at all."""

    def __init__(self, replica: str, incarnation: int) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._sequence = 0
        self._pages: dict[bytes, PageNote] = {}  # as they are now
        self._told: dict[bytes, PageNote | None] = {}  # as the router knows those that have changed
        self._since_s = 0.0  # when the first of these changed

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def note(self, digest: bytes, note: PageNote | None, now: float) -> None:
        """A page was added or moved, or (None) dropped."""
        before = self._pages.get(digest)
        if before == note:
            return
        if not self._told:
            self._since_s = now
        if self._told.setdefault(digest, before) == note:
            del self._told[digest]
        if note is None:
            del self._pages[digest]
        else:
            self._pages[digest] = note

    def is_due(self, now: float) -> bool:
        """Whether a batch should be sent now."""
        return len(self._told) >= MOST_CHANGES or (bool(self._told) and now - self._since_s >= INTERVAL_S)

    def take(self) -> Batch:
        """The next batch, which may be empty: as a sign of life, or so that a lost batch is noticed."""
        self._sequence += 1
        changes = {digest: self._pages.get(digest) for digest in self._told}
        self._told = {}
        return Batch(self._replica, self._incarnation, self._sequence, changes)

    def list_all(self) -> Listing:
        """What the replica held at the last batch, for a router that has missed one. Later changes come as usual."""
        pages = dict(self._pages)
        for digest, note in self._told.items():
            if note is None:
                del pages[digest]
            else:
                pages[digest] = note
        return Listing(self._replica, self._incarnation, self._sequence, pages)
