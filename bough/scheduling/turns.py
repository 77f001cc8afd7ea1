"""What the engine's thread asks of a scheduler and its jobs, whether they generate text or encode it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bough.errors import BoughError


class QueuedJob(Protocol):
    """A request in the queue of the engine's thread."""

    submitted_s: float
    tenant: str

    @property
    def is_over(self) -> bool:
        """Whether its listener has been told the end."""
        ...

    def fail(self, error: BoughError) -> None:
        """Tell the listener, unless it is over. Any thread may call this."""
        ...

    def refuse(self, error: BoughError) -> bool:
        """As `fail`, for one that waits; returns False if it has started or ended."""
        ...


class TurnScheduler(Protocol):
    """Runs jobs in turns. Only one thread calls it; others may read `waiting` and `running`."""

    @property
    def waiting(self) -> Sequence[QueuedJob]: ...

    @property
    def running(self) -> Sequence[QueuedJob]: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def num_free_lanes(self) -> int:
        """How many of the waiting jobs do not count as such, because they will run in the next turn."""
        ...

    @property
    def is_only_loading(self) -> bool:
        """Whether there is nothing to compute until something has been read from disk."""
        ...

    def add(self, job: Any) -> None:
        """Queue a job of the scheduler's own kind."""
        ...

    def turn(self) -> None: ...

    def fail_all(self, error: BoughError) -> None:
        """End every job with this error."""
        ...

    def postpone_check(self) -> None:
        """Cancel work that requests go before."""
        ...

    def sweep(self) -> None:
        """End jobs that were cancelled or are over."""
        ...
