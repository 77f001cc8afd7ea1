"""Tells the routers of this process that a request has its first token, and when they end.

Serve makes the routers, and may make their class anew when a deployment changes. So who uses a handle does not find its
router: the two meet here. Any thread may tell.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Told(Protocol):
    """A router, as far as it is told."""

    app_name: str

    def note_first_token(self, request_id: str) -> None:
        """A request has its first token, or has ended without one. Any thread may call it."""

    def stop(self) -> None:
        """Use Ray no longer. Another thread than the router's calls it; it waits for a moment."""


ROUTERS: WeakSet[Told] = WeakSet()


def note_first_token(request_id: str) -> None:
    """A request has its first token, or has ended without one. A second call does nothing."""
    for router in list(ROUTERS):
        router.note_first_token(request_id)


def stop_routers(application: str | None = None) -> None:
    """End the routers of an application that is deleted; or all, before the connection to Ray is closed: who uses Ray
    afterwards starts a cluster of its own.
    """
    for router in list(ROUTERS):
        if application in (None, router.app_name):
            router.stop()
