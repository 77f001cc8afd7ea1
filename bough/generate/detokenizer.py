"""From token ids to text, in whole characters only.

A token is a run of bytes, not of characters: a character may be spread over several tokens. Always true: whatever the
tokens, the pieces joined are the tokens' bytes decoded at once, with U+FFFD in the place of invalid bytes.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for; none for a token that is not meant to be seen."""
        ...


class Detokenizer:
    """Turns one answer's tokens into text as they come.

    With `strip_leading_space` the space that a sentencepiece tokenizer puts before the first word is dropped.
    """

    def __init__(self, tokenizer: TokenBytes, *, strip_leading_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._must_strip = strip_leading_space

    def add(self, token_id: int) -> str:
        """The characters that this token completes, possibly none; the rest is held back for the next."""
        data = self._tokenizer.token_bytes(token_id)
        if self._must_strip and data:
            data = data.removeprefix(b" ")
            self._must_strip = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back: bytes that no further token completes become U+FFFD."""
        return self._decoder.decode(b"", final=True)
