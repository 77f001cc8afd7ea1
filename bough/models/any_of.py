"""A pattern for any of many texts, and a search that lets other threads run meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NEVER = re.compile("(?!)")
_WINDOW_CHARS = 2**20


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, the longest first. Looking at the first character keeps thousands of texts cheap."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    if not ordered:
        return _NEVER
    firsts = "".join(sorted({re.escape(text[0]) for text in ordered}))
    return re.compile(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, ordered))})")


def occurs(pattern: re.Pattern[str], text: str, longest: int) -> bool:
    """Whether a pattern whose matches have at most `longest` characters is found in a text.

    A search holds the interpreter's lock: of a long text, one window after the other is searched.
    """
    return any(
        pattern.search(text, start, start + _WINDOW_CHARS + longest) for start in range(0, len(text) or 1, _WINDOW_CHARS)
    )
