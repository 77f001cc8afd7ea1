"""How many tokens one prefill chunk may have: as many as the device evaluates in about a quarter of a second.

Short chunks keep other requests' words coming and let a cancellation be seen soon; long ones use the device better.
"""

from __future__ import annotations

TARGET_S = 0.25
SMALLEST = 128
SMALLEST_BESIDE_OTHERS = 32  # slower by a third where the device is slow, and others' words keep coming
_WEIGHT = 0.5  # of the newest measurement


class ChunkSize:
    """The size of the next chunk, from the measured rate of those before it; or a fixed one."""

    def __init__(self, fixed: int = 0, *, first: int = 512, largest: int = 8192) -> None:
        self._fixed = fixed
        self._first = min(first, largest)
        self._largest = largest
        self._rate: float | None = None  # tokens a second

    def choose(self, *, beside_others: bool = False) -> int:
        """How many tokens the next chunk may have; fewer on a slow device while others are answered."""
        if self._fixed:
            return self._fixed
        smallest = SMALLEST_BESIDE_OTHERS if beside_others else SMALLEST
        if self._rate is None:
            return min(self._first, SMALLEST) if beside_others else self._first
        wanted = int(self._rate * TARGET_S)
        return min(self._largest, max(smallest, 1 << max(0, wanted.bit_length() - 1)))  # a power of two

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk that took so long; tiny ones say nothing of the rate."""
        if num_tokens < SMALLEST_BESIDE_OTHERS or seconds <= 0:
            return
        rate = num_tokens / seconds
        self._rate = rate if self._rate is None else _WEIGHT * rate + (1 - _WEIGHT) * self._rate
