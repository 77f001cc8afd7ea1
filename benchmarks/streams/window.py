"""The time in which all streams run: from when the last of them has begun until the first of them ends."""

from __future__ import annotations

import time
from collections.abc import Callable


class StreamWindow:
    """Counts the pieces that arrive while all of `num_streams` run. `on_open` and `on_close` are called at its ends."""

    def __init__(
        self, num_streams: int, on_open: Callable[[], None] = lambda: None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.num_pieces = 0
        self._waiting = set(range(num_streams))  # streams without a piece so far
        self._on_open = on_open
        self._on_close = on_close
        self._opened_s: float | None = None
        self._closed_s: float | None = None

    def add(self, stream: int, num_pieces: int) -> None:
        """Note that pieces of a stream have arrived now."""
        if self._closed_s is not None:
            return
        if self._opened_s is not None:
            self.num_pieces += num_pieces
            return
        self._waiting.discard(stream)
        if not self._waiting:
            self._opened_s = time.perf_counter()
            self._on_open()

    def end(self) -> None:
        """Note that a stream has ended."""
        if self._closed_s is None:
            self._closed_s = time.perf_counter()
            self._on_close()

    @property
    def seconds(self) -> float:
        """How long all streams ran together; 0 if one ended before the last had begun."""
        return 0.0 if self._opened_s is None or self._closed_s is None else self._closed_s - self._opened_s
