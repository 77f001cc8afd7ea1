"""Tells the routers of this process that a request has its first token.

Serve makes the routers, and may make their class anew when a deployment changes. So who uses a handle does not find its
router: the two meet here. Any thread may tell.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Told(Protocol):
    """A router, as far as it is told."""

    def note_first_token(self, request_id: str) -> None:
        """A request has its first token, or has ended without one. Any thread may call it."""


ROUTERS: WeakSet[Told] = WeakSet()


def note_first_token(request_id: str) -> None:
    """A request has its first token, or has ended without one. A second call does nothing."""
    for router in list(ROUTERS):
        router.note_first_token(request_id)
