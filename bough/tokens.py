"""The ids of a prompt as one value, packed once, where a tokenizer made them, and sliced from then on; and packed keys.

Each place of a prompt has a key and an input, one int32 each. The tree matches, stores and addresses by the key; a lane is
fed the input. For text both are the id of the token, and so the same bytes; only this module knows that. A key below 0 is
for what is not text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

TOKEN_BYTES = 4
assert array("i").itemsize == TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Tokens(Sequence[int]):
    """Packed tokens; as a sequence, the ids that a lane is fed.

    A span is a range of places that match as a whole or not at all: a match that ends inside one counts up to its start.
    Text has none.
    """

    key: bytes
    input: bytes
    spans: tuple[range, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[int] | bytes) -> Tokens:
        """The tokens of text, of ids or of packed ids; those that are packed with their key are returned as they are."""
        if isinstance(ids, Tokens):
            return ids
        packed = pack(ids)
        return cls(packed, packed)

    @property
    def ids(self) -> list[int]:
        """What a lane is fed. Costs a new list."""
        return unpack(self.input)

    def __len__(self) -> int:
        return len(self.key) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Tokens: ...
    def __getitem__(self, index: int | slice) -> int | Tokens:
        """One id to feed, or the tokens of a range, with the parts of the spans in it."""
        if not isinstance(index, slice):
            return memoryview(self.input).cast("i")[index]
        start, end, step = index.indices(len(self))
        assert step == 1, "tokens are sliced as they follow one another"
        cut = slice(start * TOKEN_BYTES, end * TOKEN_BYTES)
        parts = (range(max(start, span.start) - start, min(end, span.stop) - start) for span in self.spans)
        return Tokens(self.key[cut], self.input[cut], tuple(part for part in parts if part))

    def __add__(self, other: Tokens) -> Tokens:
        after = tuple(range(span.start + len(self), span.stop + len(self)) for span in other.spans)
        return Tokens(self.key + other.key, self.input + other.input, self.spans + after)


NO_TOKENS = Tokens(b"", b"")


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
