"""The loop of the interactive chat: reads messages, answers questions and runs commands until the person leaves."""

from __future__ import annotations

from collections.abc import Callable

from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.commands import run_command
from bough.cli.chat.line_editor import MessageDropped
from bough.cli.terminal.answer import catching_interrupt
from bough.errors import BoughError

HOW_TO_LEAVE = "press Ctrl-C again or type /bye to leave"


def run_chat(chat: TerminalChat, read: Callable[[], str]) -> None:
    """Chat until /bye, Ctrl-D, or two Ctrl-C at the prompt between which nothing was typed.

    Ctrl-C drops the message that is being typed. `read` raises EOFError at the end of the input. An error is shown, and the
    chat goes on.
    """
    is_warned = False
    while not chat.is_over:
        try:
            message = read()
        except EOFError:
            return chat.screen.write_line()
        except KeyboardInterrupt as interrupt:
            chat.screen.write_line()
            if is_warned and not isinstance(interrupt, MessageDropped):
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
