"""Randomness by position: the same (seed, choice, index) always gives the same number.

Nothing here keeps a state between draws, so what else runs, in which order, and on which machine changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

_BITS = 53  # as many as a float holds exactly
SEED_BITS = 53  # as many as a JSON number holds exactly, so that a reported seed can be sent back


def uniform(seed: int, choice: int, index: int) -> float:
    """The number in [0, 1) that draws the token at `index` of the `choice`-th answer to a request with this seed."""
    key = f"{seed},{choice},{index}".encode()
    digest = blake2b(key, digest_size=8, person=b"bough uniform").digest()
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / (1 << _BITS)


def choose_seed(seed: int | None, random_bits: Callable[[int], int]) -> int:
    """The seed that was asked for, or a fresh one from `random_bits` (such as `secrets.randbits`)."""
    return random_bits(SEED_BITS) if seed is None else seed
