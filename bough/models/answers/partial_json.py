"""JSON that is still being written: reads a value inside a text, and says whether more text may complete it.

Reading costs O(text). For a text that grows piece by piece a `Scan` says when reading is worth it.

Always true of a value that is returned: every client can read it. It is no deeper than `MAX_DEPTH`, its numbers are finite
and its text is valid Unicode. Line breaks in strings are allowed, because models write them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64
_MARKS = re.compile(r'["\[\]{}]')
_STRING_MARKS = re.compile(r'["\\]')
_CUT_OFF = re.compile(r"\s*(?:-|\.|[eE][+-]?|tr?u?|fa?l?s?|nu?l?)?")  # the end of an incomplete value


class CutOff(ValueError):
    """The text ends before the value does."""


@dataclass(frozen=True)
class ParsedValue:
    """A value, and the offset in the text at which it ends."""

    value: Any
    end: int


class Scan:
    """Looks for the end of the object or list that begins at `start` of a growing text. Each character is read once.

    It only counts brackets outside of strings, so that it finds the end of every valid value, but not of text that is no
    JSON. So the text has to be read when it `is_due`: at the end, and each time it has grown by an eighth, to detect early
    that it is no JSON. All readings together cost at most about nine times the length of the text.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self._at = start
        self._depth = 0
        self._is_in_string = False
        self._is_over = False
        self._next_length = 1

    def is_due(self, text: str) -> bool:
        """Whether the text, which has grown since the last call, should be read now."""
        self._advance(text)
        if self._is_over:
            return True
        length = len(text) - self.start
        is_due = length >= self._next_length
        if is_due:
            self._next_length = length + max(1, length // 8)
        return is_due

    def _advance(self, text: str) -> None:
        while not self._is_over:
            mark = (_STRING_MARKS if self._is_in_string else _MARKS).search(text, self._at)
            if mark is None:
                self._at = len(text)
                return
            if mark[0] == "\\":
                if mark.end() == len(text):  # the escaped character comes with the next piece
                    self._at = mark.start()
                    return
                self._at = mark.end() + 1
                continue
            self._at = mark.end()
            if mark[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark[0] in "[{" else -1
                self._is_over = self._depth <= 0


def read_value(text: str, start: int = 0) -> ParsedValue:
    """Read the value at `start`. Raises CutOff if more text may complete it, and ValueError if nothing can."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        return ParsedValue(_plain(value, 0), end)
    except json.JSONDecodeError as error:
        if _is_cut_off(error):
            raise CutOff(str(error)) from error
        raise
    except RecursionError as error:
        raise ValueError(f"deeper than {MAX_DEPTH} levels") from error


def read_all(text: str) -> Any:
    """Read a whole text as one value. Raises ValueError if it is not JSON."""
    found = read_value(text, len(text) - len(text.lstrip()))
    if text[found.end :].strip():
        raise ValueError(f"more follows after {found.end} characters")
    return found.value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    rest = error.doc[error.pos :]
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\uXXXX"):
        return len(rest) <= len("u0000")
    return _CUT_OFF.fullmatch(rest) is not None


def _plain(value: Any, depth: int) -> Any:
    """The value with lone surrogates replaced. Raises ValueError if it is too deep or not finite."""
    if depth > MAX_DEPTH or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"deeper than {MAX_DEPTH} levels, or not finite")
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {_plain(key, depth): _plain(each, depth + 1) for key, each in value.items()}
    return value
