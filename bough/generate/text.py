"""The text of an answer, token by token: whole characters, and nothing that may still become a stop string.

A token is a run of bytes, and a character may take several tokens. Always true: the joined pieces are the tokens' bytes
decoded at once, with U+FFFD in place of invalid bytes.

Stop strings: always true, however the text is divided into pieces: the emitted text ends before the match that starts first
(of those that start there, the longest), or is the whole text if there is no match. Text that may become a match is held
back.

    text so far   . . . . . . . . a b c
                  emitted ─────►│ held: "abc" may become the stop string "abcd"

Each character is compared about once per stop string (Knuth, Morris, Pratt), however long those are. While nothing is held
back, text up to the next character that begins a stop string is passed over at C speed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True, order=True)
class _Match:
    """A match. The smallest wins: the first start, then the greatest length."""

    start: int
    negative_length: int
    text: str


class StopFinder:
    """Passes the text of one answer on until a stop string is complete; then `found` is that string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._prefixes = [_Prefix(stop) for stop in dict.fromkeys(stops)]
        self._first_character = re.compile("|".join(re.escape(first) for first in {stop[0] for stop in stops}))
        self._best: _Match | None = None
        self._held = ""
        self._end = 0  # how many characters have come

    def add(self, text: str) -> str:
        """Return the text that is now safe to emit; nothing once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._prefixes:
            return text
        passed = 0
        if not self._held:  # up to the first character that begins a stop string
            found = self._first_character.search(text)
            passed = len(text) if found is None else found.start()
        self._end += passed
        return text if passed == len(text) else text[:passed] + self._search(text[passed:])

    def _search(self, text: str) -> str:
        self._held += text
        start = self._end + len(text) - len(self._held)
        for character in text:
            self._advance(character)
            if self._best is not None and self._open_start() > self._best.start:
                return self._finish(start)
        open_start = self._open_start()
        return self._emit(start, open_start if self._best is None else min(self._best.start, open_start))

    def flush(self) -> str:
        """Return the text that was held back, up to a complete stop string if there is one. Call it last."""
        start = self._end - len(self._held)
        return self._finish(start) if self._best is not None else self._emit(start, self._end)

    def _advance(self, character: str) -> None:
        self._end += 1
        for prefix in self._prefixes:
            if prefix.advance(character):
                length = len(prefix.stop)
                match = _Match(self._end - length, -length, prefix.stop)
                self._best = match if self._best is None else min(self._best, match)

    def _open_start(self) -> int:
        """The first offset from which the text may still grow into a stop string."""
        return self._end - max(prefix.length for prefix in self._prefixes)

    def _finish(self, start: int) -> str:
        assert self._best is not None
        self.found = self._best.text
        text = self._emit(start, self._best.start)
        self._held, self._best = "", None
        return text

    def _emit(self, start: int, end: int) -> str:
        text, self._held = self._held[: end - start], self._held[end - start :]
        return text


class _Prefix:
    """The longest proper prefix of one stop string that the text now ends with: `length` characters."""

    def __init__(self, stop: str) -> None:
        assert stop, "a stop string has at least one character"
        self.stop = stop
        self.length = 0
        self._fallbacks = _find_borders(stop)

    def advance(self, character: str) -> bool:
        """Advance by one character of the text; return whether the stop string is now complete."""
        while self.length and self.stop[self.length] != character:
            self.length = self._fallbacks[self.length - 1]
        self.length += self.stop[self.length] == character
        is_complete = self.length == len(self.stop)
        if is_complete:
            self.length = 0  # a later occurrence never wins against this one
        return is_complete


def _find_borders(word: str) -> list[int]:
    """For each non-empty prefix of the word, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for end in range(1, len(word)):
        while length and word[end] != word[length]:
            length = borders[length - 1]
        length += word[end] == word[length]
        borders[end] = length
    return borders


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
        return self._stops.found

    def add(self, token_id: int) -> str:
        text = self._detokenizer.add(token_id)
        return self._emit(self._stops.add(text) if self._has_stops else text)

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last token."""
        return self._emit(self._stops.add(self._detokenizer.flush()) + self._stops.flush())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def logprob(self, sampled: SampledToken) -> TokenLogprob:
        assert sampled.logprob is not None
        text = self._vocabulary.token_bytes(sampled.token_id).decode("utf-8", "replace")
        return TokenLogprob(sampled.token_id, text, sampled.logprob, sampled.top)
