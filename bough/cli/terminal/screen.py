"""What a person sees: answers on standard output as they are, everything else on standard error.

The text of a model is never read as markup, and on a terminal it cannot steer the terminal: control characters are shown
as pictures of themselves.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

_HARMLESS = "\n\t"
_C0_AND_DELETE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _HARMLESS} | {0x7F: "␡"}
_C1 = dict.fromkeys(range(0x80, 0xA0), "�")
_PICTURES = _C0_AND_DELETE | _C1


def neutralise(text: str) -> str:
    """The text with every control character but line breaks and tabs made visible. Works piece by piece."""
    return text.translate(_PICTURES)


class Screen:
    """Standard output and standard error, as they are when it is made."""

    def __init__(self) -> None:
        self.out = sys.stdout
        self.notes = Console(stderr=True, highlight=False)
        self._is_at_line_start = True

    @property
    def is_terminal(self) -> bool:
        """Whether answers go to a terminal."""
        return self.out.isatty()

    def write(self, text: str) -> None:
        """Put out a piece of text at once."""
        if text:
            self._is_at_line_start = text.endswith("\n")
            self.out.write(neutralise(text) if self.is_terminal else text)
            self.out.flush()

    def write_line(self, text: str = "") -> None:
        self.write(text + "\n")

    def end_line(self) -> None:
        """Begin a new line, unless one has just begun."""
        if not self._is_at_line_start:
            self.write("\n")

    def note(self, text: str) -> None:
        """Say something that is no part of the answer."""
        self._note(neutralise(text), "dim")

    def error(self, text: str) -> None:
        self._note(f"error: {neutralise(text)}", "red")

    def _note(self, text: str, style: str) -> None:
        """Wrapped between words on a terminal, one line anywhere else."""
        self.notes.print(Text(text, style=style), soft_wrap=not self.notes.is_terminal)


def is_interactive() -> bool:
    """Whether a person at a terminal can answer a question."""
    return sys.stdin.isatty()


def confirm_or_exit(question: str) -> None:
    """Ask the question and exit with code 1 unless the answer is yes. Without a terminal nothing is asked."""
    if is_interactive() and not typer.confirm(question, err=True):
        raise typer.Exit(1)
