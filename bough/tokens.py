"""The ids of a prompt as one value: packed once, where a tokenizer made them, and sliced from then on.

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
        packed = ids if isinstance(ids, bytes) else array("i", ids).tobytes()
        return cls(packed, packed)

    @property
    def ids(self) -> list[int]:
        """What a lane is fed. Costs a new list."""
        return array("i", self.input).tolist()

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
