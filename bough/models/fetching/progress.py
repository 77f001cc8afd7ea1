"""How long work tells its progress: the caller renders it, this package never prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears of one piece of work after another: each starts, advances any number of times, and finishes or fails."""

    def start(self, label: str, total_bytes: int | None) -> None:
        """Work of `total_bytes` begins; None: its size is not known, or it is not counted in bytes."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done. Negative when work had to start over."""
        ...

    def finish(self) -> None:
        """The work that was started last is over, well or not."""
        ...


class SilentProgress:
    """Tells nobody."""

    def start(self, label: str, total_bytes: int | None) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass
