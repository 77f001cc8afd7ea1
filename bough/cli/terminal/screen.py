"""Output: answers go to standard output unchanged, everything else goes to standard error.

The text of a model is never interpreted as markup. On a terminal its control characters are replaced by visible symbols, so
that a model cannot control the terminal.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable

import typer
from rich.console import Console
from rich.text import Text

from bough.cli.terminal.wrap import WordWrap
from bough.errors import RequestError

_HARMLESS = "\n\t"
_C0_AND_DELETE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _HARMLESS} | {0x7F: "␡"}
_C1 = dict.fromkeys(range(0x80, 0xA0), "�")
_USUAL_WIDTH = 80
_PICTURES = _C0_AND_DELETE | _C1


def neutralise(text: str) -> str:
    """Replace every control character except line breaks and tabs by a visible symbol."""
    return text.translate(_PICTURES)


class Screen:
    """Standard output and standard error, as they are when the object is made."""

    def __init__(self) -> None:
        self.out = sys.stdout
        self.notes = Console(stderr=True, highlight=False)
        self._is_at_line_start = True

    @property
    def is_terminal(self) -> bool:
        return self.out.isatty()

    def write(self, text: str, wrap: WordWrap | None = None) -> None:
        """Write a piece of text and flush it. On a terminal, `wrap` breaks its lines between words."""
        if not text:
            return
        self._is_at_line_start = text.endswith("\n")
        if self.is_terminal:
            text = neutralise(text)
            text = text if wrap is None else wrap.add(text, self.width or _USUAL_WIDTH)
        self.out.write(text)
        self.out.flush()

    @property
    def width(self) -> int | None:
        """The columns of the terminal; None outside of one."""
        return shutil.get_terminal_size((_USUAL_WIDTH, 0)).columns if self.is_terminal else None

    def write_line(self, text: str = "") -> None:
        self.write(text + "\n")

    def write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write_line(line)

    def end_line(self) -> None:
        """End the current line, unless it is empty."""
        if not self._is_at_line_start:
            self.write("\n")

    def note(self, text: str) -> None:
        """Write a message to standard error."""
        self._note(neutralise(text), "dim")

    def error(self, text: str) -> None:
        self._note(f"error: {neutralise(text)}", "red")

    def exit_with(self, problems: Collection[str]) -> None:
        """Write each problem, and exit with code 1 if there is one."""
        for problem in problems:
            self.error(problem)
        if problems:
            raise typer.Exit(1)

    def _note(self, text: str, style: str) -> None:
        """Write one line; a terminal wraps it between words."""
        self.notes.print(Text(text, style=style), soft_wrap=not self.notes.is_terminal)


def is_interactive() -> bool:
    """Whether a person at a terminal can answer a question."""
    return sys.stdin.isatty()


def confirm_or_exit(action: str) -> None:
    """Ask whether to do this, and exit with code 1 unless the answer is yes. Raises RequestError without a terminal."""
    if not is_interactive():
        raise RequestError(f"{action}: this needs -y without a terminal")
    if not typer.confirm(f"{action}?", err=True):
        raise typer.Exit(1)
