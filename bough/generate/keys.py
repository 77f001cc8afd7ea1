"""The keys of JSON that is being written, so that none is written twice in one object.

A grammar cannot say this of keys that a schema does not name. JSON itself is left to the grammar: what is added here is a
beginning of valid JSON. Keys are compared as they are written; grammars of llguidance escape a character in one way only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

_QUOTE, _ESCAPE = 0x22, 0x5C
_BLANKS = (b"", b" ")  # that tokens have before a key


class WrittenKeys:
    """Follows JSON byte by byte. It knows the keys of each object that is open at the end, and what it is in there."""

    def __init__(self) -> None:
        self._open: list[set[bytes] | None] = []  # the keys of objects; None for lists
        self._is_key_next = False
        self._key: bytearray | None = None  # what is written of a key
        self._is_in_text = False
        self._is_escaped = False

    def add(self, written: bytes) -> None:
        """Go on by more bytes. Costs their number."""
        for byte in written:
            if self._is_in_text:
                self._add_to_text(byte)
            elif byte == _QUOTE:
                self._is_in_text = True
                self._key = bytearray() if self._is_key_next else None
            elif byte in b"{[":
                self._open.append(set() if byte == ord("{") else None)
                self._is_key_next = byte == ord("{")
            elif byte in b"}]" and self._open:
                self._open.pop()
                self._is_key_next = False
            elif byte in b",:":
                self._is_key_next = byte == ord(",") and bool(self._open) and self._open[-1] is not None

    def _add_to_text(self, byte: int) -> None:
        if byte == _QUOTE and not self._is_escaped:
            self._is_in_text = False
            if self._key is not None and self._open and (keys := self._open[-1]) is not None:
                keys.add(bytes(self._key))
            self._key = None
            return
        self._is_escaped = byte == _ESCAPE and not self._is_escaped
        if self._key is not None:
            self._key.append(byte)

    def repetitions(self) -> Iterator[bytes]:
        """What must not come next, because it would end a key of the innermost object that is there already."""
        keys = self._open[-1] if self._open else None
        if not keys:
            return
        if self._key is not None:
            yield from (each[len(self._key) :] + b'"' for each in keys if each.startswith(self._key))
        elif self._is_key_next and not self._is_in_text:
            yield from (blank + b'"' + each + b'"' for each in keys for blank in _BLANKS)


class QuoteTokens:
    """The tokens of a vocabulary that have a quotation mark in them, by what they begin with."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` are the bytes of all tokens, by their ids."""
        self._tokens = sorted((text, token_id) for token_id, text in enumerate(texts) if b'"' in text)

    def starting_with(self, beginning: bytes) -> Iterator[int]:
        """The ids of the tokens that begin so."""
        for text, token_id in self._tokens[bisect_left(self._tokens, (beginning, -1)) :]:
            if not text.startswith(beginning):
                return
            yield token_id


def forbid(allowed: bytes, tokens: QuoteTokens, keys: WrittenKeys) -> bytes:
    """The mask of allowed tokens without those that would repeat a key, unless the grammar allows nothing else."""
    repeated = [token_id for beginning in keys.repetitions() for token_id in tokens.starting_with(beginning)]
    if not repeated:
        return allowed
    mask = bytearray(allowed)
    for token_id in repeated:
        if token_id // 8 < len(mask):
            mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask) if any(mask) else allowed
