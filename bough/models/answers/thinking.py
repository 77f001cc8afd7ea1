"""Splits thinking from text: what a model writes between <think> and </think> before its answer.

Always true, however the text is cut into pieces: all `thinking` and all `text` that comes out is the same; an answer that
does not begin with <think> comes out unchanged. Held back is only what may still be part of a marker, and blanks that are
dropped at the border between the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

OPEN, CLOSE = "<think>", "</think>"
_LINE_ENDS = "\r\n"


@dataclass(frozen=True)
class Thought:
    """What is certain after a piece; either may be empty."""

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

    def add(self, text: str) -> Thought:
        """Add the next piece of the answer, and return what is certain by now."""
        return self._split(text, is_end=False)

    def flush(self) -> Thought:
        """The answer has ended: return what was held back. Thinking without an end tag is still thinking."""
        return self._split("", is_end=True)

    def _split(self, text: str, is_end: bool) -> Thought:
        self._held += text
        if self._part is _Part.START:
            self._leave_start(is_end)
        thinking = self._take_thinking(is_end) if self._part is _Part.THINKING else ""
        if self._part is _Part.GAP:
            self._leave_gap(is_end)
        return Thought(thinking, self._take_all() if self._part is _Part.TEXT else "")

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

    def _take_all(self) -> str:
        taken, self._held = self._held, ""
        return taken


def len_undecided(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    return max(
        (
            length
            for marker in markers
            for length in range(1, min(len(marker), len(text) + 1))
            if text.endswith(marker[:length])
        ),
        default=0,
    )
