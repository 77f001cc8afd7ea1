'''Input at the prompt of the chat: whole messages, with line editing and a history that is saved between chats.

A message between """ and """ may have many lines. Only its owner can read the history file.
'''

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from bough.cli.prompt_args import clean

try:
    import readline as _readline
except ModuleNotFoundError:  # not on Windows: input works there without a history
    _readline = None  # type: ignore[assignment]

PROMPT = ">>> "
MORE_PROMPT = "... "
_QUOTES = '"""'
_HISTORY_LINES = 1_000
ReadLine = Callable[[str], str]


def read_message(read_line: ReadLine) -> str:
    """The next message, without the quotes around it. Raises EOFError or KeyboardInterrupt as `read_line` does."""
    line = read_line(PROMPT)
    before, quotes, text = line.partition(_QUOTES)
    if not quotes or not (before.strip() == "" or line.startswith("/")):
        return clean(line).strip()
    while _QUOTES not in text:
        text += "\n" + read_line(MORE_PROMPT)
    return clean(before + text.partition(_QUOTES)[0].strip("\n"))


@contextlib.contextmanager
def history(file: Path | None, readline: ModuleType | None = _readline) -> Iterator[None]:
    """Load the history from the file and save it at the end. A file that cannot be read or written is ignored."""
    if readline is None or file is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted text is one message, including line breaks
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _make_private(file)
            readline.write_history_file(file)
            file.chmod(0o600)


def _make_private(file: Path) -> None:
    """Create the file with its permissions before anything is written to it, so that no other user can read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.chmod(0o600)
