"""Packed token ids: `bytes` of native int32, so that long prefixes are compared and copied at C speed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from bough.tokens import TOKEN_BYTES as TOKEN_BYTES

Tokens = Sequence[int] | bytes


def pack(tokens: Iterable[int] | bytes) -> bytes:
    """Pack ids; packed bytes are returned as they are."""
    return tokens if isinstance(tokens, bytes) else array("i", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def num_tokens(packed: bytes) -> int:
    return len(packed) // TOKEN_BYTES


def cut(packed: bytes, start: int, end: int | None = None) -> bytes:
    return packed[start * TOKEN_BYTES : None if end is None else end * TOKEN_BYTES]


def common_prefix(edge: bytes, tokens: bytes, start: int = 0) -> int:
    """How many leading tokens of `edge` are in `tokens` from token `start` on.

    A whole edge, the usual case, costs one comparison; a divergence is found by halving, O(n) bytes compared in all.
    """
    at = start * TOKEN_BYTES
    if tokens.startswith(edge, at):
        return num_tokens(edge)
    low, high = 0, min(num_tokens(edge), num_tokens(tokens) - start)  # [0, low) is equal; the answer is at most high
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(edge[low * TOKEN_BYTES : middle * TOKEN_BYTES], at + low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low
