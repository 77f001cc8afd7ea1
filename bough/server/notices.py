"""What the log says once of requests whose parts have no effect."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

MOST_NOTICES = 1_000  # that are remembered: clients choose the names in them


class Notices:
    """Lines for the log about parts of requests that have no effect. Each part is named once in a run of the server."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def add(self, part: str, reason: str) -> None:
        if part not in self._named and len(self._named) < MOST_NOTICES:
            self._named.add(part)
            log.info("%s has no effect: %s", part, reason)
