"""Splits thinking from text: the part of an answer between <think> and </think> at its beginning.

Always true, however the text is cut into pieces: all `thinking` and all `text` that is returned is the same; an answer that
does not begin with <think> is returned unchanged. Only text that may be part of a marker, and blanks that are dropped at
the border between the two, are held back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

OPEN, CLOSE = "<think>", "</think>"
_LINE_ENDS = "\r\n"


@dataclass(frozen=True)
class ThinkingPiece:
    """The certain text after a piece of the answer; either may be empty."""

    thinking: str = ""
    text: str = ""


class _Part(Enum):
    START = "nothing but blanks yet"
    THINKING = "between the markers"
    GAP = "nothing but blanks since the closing marker"
    TEXT = "the answer"


class ThinkingParser:
    """Splits thinking from text in one answer. `starts_inside`: the prompt ends with <think>."""

    def __init__(self, starts_inside: bool = False) -> None:
        self._part = _Part.START
        self._starts_inside = starts_inside
        self._held = ""
        self._has_thought = False

    def add(self, text: str) -> ThinkingPiece:
        """Add the next piece of the answer, and return the text that is certain now."""
        return self._split(text, is_end=False)

    def flush(self) -> ThinkingPiece:
        """Return the text that was held back at the end of the answer. Thinking without an end tag is still thinking."""
        return self._split("", is_end=True)

    def _split(self, text: str, is_end: bool) -> ThinkingPiece:
        self._held += text
        if self._part is _Part.START:
            self._leave_start(is_end)
        thinking = self._take_thinking(is_end) if self._part is _Part.THINKING else ""
        if self._part is _Part.GAP:
            self._leave_gap(is_end)
        if self._part is not _Part.TEXT:
            return ThinkingPiece(thinking)
        taken, self._held = self._held, ""
        return ThinkingPiece(thinking, taken)

    def _leave_start(self, is_end: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._part, self._held = _Part.THINKING, begun[len(OPEN) :]
        elif is_end or not OPEN.startswith(begun):
            self._part = _Part.THINKING if self._starts_inside else _Part.TEXT

    def _take_thinking(self, is_end: bool) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip(_LINE_ENDS)
        before, marker, after = self._held.partition(CLOSE)
        if marker:
            self._part, self._held = _Part.GAP, after
            return before.rstrip(_LINE_ENDS)
        certain = self._held if is_end else self._held[: len(self._held) - len_undecided(self._held, (CLOSE,))]
        certain = certain.rstrip(_LINE_ENDS)
        self._held = self._held[len(certain) :]
        self._has_thought = self._has_thought or bool(certain)
        return certain

    def _leave_gap(self, is_end: bool) -> None:
        """Drop the blank lines before the text, but not the blanks that its first line begins with."""
        begun = self._held.lstrip()
        if begun or is_end:
            blanks = self._held[: len(self._held) - len(begun)]
            self._held = blanks.rpartition("\n")[2] + begun if begun else ""
            self._part = _Part.TEXT


def len_undecided(text: str, markers: Iterable[str]) -> int:
    """The number of characters at the end of the text that may begin a marker."""
    beginnings = (marker[:length] for marker in markers for length in range(1, len(marker)))
    return max((len(each) for each in beginnings if text.endswith(each)), default=0)
