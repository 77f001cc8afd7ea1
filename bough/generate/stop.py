"""Stop strings: the text of an answer ends before the first of them.

Always true, however the text is divided into pieces: the emitted text ends before the match that starts first (of those
that start there, the longest), or is the whole text if there is no match. Text that may become a match is held back.

    text so far   . . . . . . . . a b c
                  emitted ─────►│ held: "abc" may become the stop string "abcd"

Each character is compared about once per stop string (Knuth, Morris, Pratt), however long those are. While nothing is held
back, text up to the next character that begins a stop string is passed over at C speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


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
