"""An answer's text as its tokens come: whole characters, nothing that may still become a stop string.

A token is a run of bytes, not of characters: a character may be spread over several tokens. Always true: whatever the
tokens, the pieces joined are the tokens' bytes decoded at once, with U+FFFD in place of invalid bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from bough.generate.stop import StopFinder
from bough.types import Sampled, TokenLogprob


class TokenBytes(Protocol):
    """The part of a tokenizer that the detokenizer uses."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of this token; none for a special token."""
        ...


class Vocabulary(TokenBytes, Protocol):
    """The part of a tokenizer that generation uses."""

    @property
    def eos_ids(self) -> frozenset[int]: ...


class Detokenizer:
    """Turns the tokens of one answer into text as they arrive.

    With `strip_leading_space` the space that a sentencepiece tokenizer puts before the first word is dropped.
    """

    def __init__(self, tokenizer: TokenBytes, *, strip_leading_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False  # whether the last token has ended within a character
        self._must_strip = strip_leading_space

    def add(self, token_id: int) -> str:
        """The characters that this token completes, possibly none. Incomplete bytes are held back."""
        data = self._tokenizer.token_bytes(token_id)
        if self._must_strip and data:
            data = data.removeprefix(b" ")
            self._must_strip = False
        if not self._holds_bytes:
            try:
                return data.decode()  # nearly all tokens are whole characters, and this is the fastest way to read those
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The text that was held back. Incomplete bytes become U+FFFD."""
        return self._decoder.decode(b"", final=True)


class AnswerText:
    """The detokenizer, then the stop strings. `all` is the text that was emitted so far."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, strip_leading_space: bool = False) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, strip_leading_space=strip_leading_space)
        self._stops = StopFinder(stops)
        self._has_stops = bool(stops)
        self._pieces: list[str] = []

    @property
    def all(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._stops.found

    def add(self, token_id: int) -> str:
        """The text that is safe to emit now."""
        text = self._detokenizer.add(token_id)
        return self._emit(self._stops.add(text) if self._has_stops else text)

    def flush(self) -> str:
        """The text that was held back. Call it after the last token."""
        return self._emit(self._stops.add(self._detokenizer.flush()) + self._stops.flush())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        text = self._vocabulary.token_bytes(sampled.token_id).decode("utf-8", "replace")
        return TokenLogprob(sampled.token_id, text, sampled.logprob, sampled.top)
