'''The loop of the interactive chat: reads messages, answers questions and runs commands until the person leaves.

A message between """ and """ may have many lines. Line editing has a history, which is saved between chats.
'''

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.commands import run_command
from bough.cli.prompt_args import clean
from bough.cli.terminal.answer import catching_interrupt
from bough.errors import BoughError

try:
    import readline as _readline
except ModuleNotFoundError:  # Python can be built without it: then there is no history
    _readline = None  # type: ignore[assignment]

PROMPT = ">>> "
MORE_PROMPT = "... "
_QUOTES = '"""'
_HISTORY_LINES = 1_000
ReadLine = Callable[[str], str]
HOW_TO_LEAVE = "press Ctrl-C again or type /bye to leave"


def run_chat(chat: TerminalChat, read: Callable[[], str]) -> None:
    """Chat until /bye, Ctrl-D, or two Ctrl-C at the prompt. `read` raises EOFError at the end of the input.

    The first Ctrl-C drops the message that is being typed. An error is shown, and the chat goes on.
    """
    is_warned = False
    while not chat.is_over:
        try:
            message = read()
        except EOFError:
            return chat.screen.write_line()
        except KeyboardInterrupt:
            chat.screen.write_line()
            if is_warned:
                return None
            is_warned = True
        else:
            is_warned = _take_message(chat, message)
        if is_warned:
            chat.screen.note(HOW_TO_LEAVE)
    return None


def _take_message(chat: TerminalChat, message: str) -> bool:
    """Run a command or answer a question, and show errors. Returns whether a Ctrl-C came too late to stop the answer."""
    with catching_interrupt() as is_interrupted:
        try:
            if message.startswith("/"):
                run_command(chat, message)
            elif message:
                chat.answer(message)
        except BoughError as error:
            chat.screen.end_line()
            chat.screen.error(str(error))
    return is_interrupted()


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
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)  # before anything is written, so that no other user can read it
            file.chmod(0o600)
            readline.write_history_file(file)
            file.chmod(0o600)
