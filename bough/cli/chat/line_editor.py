'''What is typed at the chat's prompt: messages of one or many lines, the keys, and the history.

A message between """ and """ may have many lines; so may one that is pasted. Each message is one entry of the history. It
is saved between chats, with a line separator (U+2028) for each line break inside an entry.
'''

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from bough.cli.prompt_args import clean
from bough.cli.terminal.answer import on_interrupt

try:
    import readline as _readline
except ModuleNotFoundError:  # Python can be built without it: then there is no history
    _readline = None  # type: ignore[assignment]

PROMPT = ">>> "
MORE_PROMPT = "... "
_QUOTES = '"""'
_HISTORY_LINES = 1_000
_BREAK = "\u2028"
ReadLine = Callable[[str], str]


class MessageDropped(KeyboardInterrupt):
    """Ctrl-C was pressed when a part of a message was typed."""


def read_message(read_line: ReadLine, keep: Callable[[str], None] | None = None) -> str:
    """The next message, without the quotes around it; `keep` gets it as it was typed.

    Raises EOFError or KeyboardInterrupt as `read_line` does, and MessageDropped for the latter inside of quotes.
    """
    typed = line = read_line(PROMPT)
    before, quotes, text = line.partition(_QUOTES)
    is_quoted = bool(quotes) and (before.strip() == "" or line.startswith("/"))
    while is_quoted and _QUOTES not in text:
        try:
            line = read_line(MORE_PROMPT)
        except KeyboardInterrupt as error:
            raise MessageDropped from error
        typed, text = f"{typed}\n{line}", f"{text}\n{line}"
    if keep is not None:
        keep(typed)
    return clean(before + text.partition(_QUOTES)[0].strip("\n")) if is_quoted else clean(typed).strip()


class LineEditor:
    """Reads messages from the terminal with readline, if Python has it. Use it in a `with` statement.

    Tab completes the first word of a message to one of `words`. Without a file there is no history; a file that cannot be
    read or written is ignored.
    """

    def __init__(self, file: Path | None, words: Iterable[str], readline: ModuleType | None = _readline) -> None:
        self._file = file
        self._words = sorted(words)
        self._readline: Any = readline

    def read_message(self) -> str:
        """The next message. Raises EOFError, KeyboardInterrupt, or MessageDropped if a part of it was typed."""
        return read_message(self._read_line, self._add_to_history)

    def _read_line(self, prompt: str) -> str:
        typed = ""

        def note_typed(number: int, frame: FrameType | None) -> None:  # afterwards readline has forgotten it
            nonlocal typed
            typed = self._readline.get_line_buffer() if self._readline else ""
            raise KeyboardInterrupt

        with on_interrupt(note_typed):
            try:
                return input(prompt)
            except KeyboardInterrupt as error:
                if typed:
                    raise MessageDropped from error
                raise

    def _add_to_history(self, message: str) -> None:
        if self._readline and message and message != next(reversed(self._entries()), ""):
            self._readline.add_history(message)

    def _complete(self, word: str, number: int) -> str | None:
        is_first = self._readline.get_begidx() == 0
        found = [each for each in self._words if is_first and word and each.startswith(word)]
        return found[number] if number < len(found) else None

    def __enter__(self) -> Self:
        if self._readline is None:
            return self
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._file)
            self._replace_in_history(_BREAK, "\n")
        self._readline.set_history_length(_HISTORY_LINES)
        self._readline.set_auto_history(False)  # a message may have many lines
        self._readline.parse_and_bind("set enable-bracketed-paste on")  # pasted text is one message, with its line breaks
        is_libedit = "libedit" in (self._readline.__doc__ or "")
        self._readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        self._readline.set_completer_delims(" \t\n")
        self._readline.set_completer(self._complete)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None or self._file is None:
            return
        self._replace_in_history("\n", _BREAK)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)  # before anything is written, so that no other user can read it
            self._file.chmod(0o600)
            self._readline.write_history_file(self._file)
            self._file.chmod(0o600)

    def _replace_in_history(self, old: str, new: str) -> None:
        for place, entry in enumerate(self._entries()):
            if old in entry:
                self._readline.replace_history_item(place, entry.replace(old, new))

    def _entries(self) -> list[str]:
        count = self._readline.get_current_history_length()
        return [self._readline.get_history_item(number) or "" for number in range(1, count + 1)]
