"""The text of an answer, token by token: whole characters, and nothing that may still become a stop string.

A token is a run of bytes, and a character may take several tokens. Always true: the joined pieces are the tokens' bytes
decoded at once, with U+FFFD in place of invalid bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from bough.generate.stop import StopFinder
from bough.types import SampledToken, TokenLogprob


class Vocabulary(Protocol):
    """The part of a tokenizer that generation uses."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first word of a chat's answer has a space before it that must be dropped."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for a special token."""


class Detokenizer:
    """Turns tokens into text. `strip_leading_space` drops the space that sentencepiece puts before the first word."""

    def __init__(self, tokenizer: Vocabulary, *, strip_leading_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False  # whether the last token ended within a character
        self._must_strip = strip_leading_space

    def add(self, token_id: int) -> str:
        """Return the characters that this token completes. Incomplete bytes are held back."""
        data = self._tokenizer.token_bytes(token_id)
        if self._must_strip and data:
            data = data.removeprefix(b" ")
            self._must_strip = False
        if not self._holds_bytes:
            try:
                return data.decode()  # the fastest way for nearly all tokens, which are whole characters
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for incomplete bytes."""
        return self._decoder.decode(b"", final=True)


class AnswerText:
    """The detokenizer, then the stop strings. `all` is the text that was emitted so far."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, strip_leading_space: bool = False) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, strip_leading_space=strip_leading_space)
        self._stops = StopFinder(stops) if stops else None
        self._pieces: list[str] = []

    @property
    def all(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def add(self, token_id: int) -> str:
        text = self._detokenizer.add(token_id)
        return self._emit(text if self._stops is None else self._stops.add(text))

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last token."""
        text = self._detokenizer.flush()
        return self._emit(text if self._stops is None else self._stops.add(text) + self._stops.flush())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def logprob(self, sampled: SampledToken) -> TokenLogprob:
        assert sampled.logprob is not None
        text = self._vocabulary.token_bytes(sampled.token_id).decode("utf-8", "replace")
        return TokenLogprob(sampled.token_id, text, sampled.logprob, sampled.top)
