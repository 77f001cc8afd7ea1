"""Wrapping the words of a streamed text at the width of the terminal.

Text is written as it comes, in pieces that may end inside a word. A word that grows over the edge is erased and written
again on the next line. Line breaks of the text stay, and so do the lines between ``` fences. A word that is longer than a
line is left to the terminal, so that an address can still be selected as one. Between wide characters (Chinese, emoji) a
line may break anywhere.

Always true: what is on the screen is the text, with some blanks replaced by line breaks, and with line breaks added before
wide characters.
"""

from __future__ import annotations

from rich.cells import cell_len

_FENCE = "```"
_JOINER = "\u200d"
_TAB_STOP = 8


class WordWrap:
    """The state of the last line that was written."""

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # the last word, as far as it was written
        self._is_too_long = False  # the word is left to the terminal
        self._is_break_due = False  # a blank did not fit: the next word begins a line
        self._line = ""  # the beginning of the text's own line
        self._is_in_fence = False

    def add(self, text: str, width: int) -> str:
        """Return what to write for the next piece, on a terminal that has `width` columns now."""
        limit = width - 1  # a cursor behind the last column could not go back over a word
        return "".join(self._add_character(character, limit) for character in text)

    def _add_character(self, character: str, limit: int) -> str:
        if character == "\n":
            return self._end_line()
        if len(self._line) < len(_FENCE) and (self._line or not character.isspace()):
            self._line += character
        if self._is_in_fence or self._line == _FENCE:
            return character
        return self._add_blank(character, limit) if character.isspace() else self._add_visible(character, limit)

    def _end_line(self) -> str:
        if self._line == _FENCE:
            self._is_in_fence = not self._is_in_fence
        self._line = ""
        self._start_line()
        return "\n"

    def _start_line(self) -> None:
        self._column, self._word, self._is_too_long, self._is_break_due = 0, "", False, False

    def _add_blank(self, blank: str, limit: int) -> str:
        if self._is_too_long:
            self._column %= limit + 1
        self._word, self._is_too_long = "", False
        cells = _TAB_STOP - self._column % _TAB_STOP if blank == "\t" else 1
        if self._is_break_due or self._column + cells > limit:
            self._is_break_due = True
            return ""
        self._column += cells
        return blank

    def _add_visible(self, character: str, limit: int) -> str:
        written = ""
        if self._is_break_due:
            self._start_line()
            written = "\n"
        if cell_len(character) > 1 and not self._word.endswith(_JOINER):
            self._word = ""  # a line may break before it
        before = cell_len(self._word)
        self._word += character
        grown = cell_len(self._word) - before
        if self._column + grown > limit and not self._is_too_long:
            return written + self._move_word(before, limit)
        self._column += grown
        return written + character

    def _move_word(self, written_cells: int, limit: int) -> str:
        """Write the word on the next line instead, if it fits there."""
        cells = cell_len(self._word)
        if cells > limit or self._column == written_cells:
            self._is_too_long = True
            self._column += cells - written_cells
            return self._word[-1]
        self._column = cells
        erase = f"\x1b[{written_cells}D\x1b[K" if written_cells else ""
        return f"{erase}\n{self._word}"
