"""What is typed at the prompt: messages of one and of many lines, the keys of a real terminal, the history."""

from __future__ import annotations

import os
import pty
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bough.cli.chat.line_editor import LineEditor, MessageDropped, read_message


def typed(*lines: str) -> str:
    coming = iter(lines)
    return read_message(lambda prompt: next(coming))


def test_a_line_is_a_message():
    assert typed("  Hello there ") == "Hello there"


def test_quotes_hold_many_lines_together():
    assert typed('"""first', "", 'second""" what follows is dropped') == "first\n\nsecond"
    assert typed('"""', "first", '"""') == "first"
    assert typed('"""one line"""') == "one line"


def test_a_command_may_have_a_text_of_many_lines():
    assert typed('/set system """Be', 'brief."""') == "/set system Be\nbrief."


def test_quotes_inside_a_message_are_its_own():
    assert typed('What does """ mean in Python?') == 'What does """ mean in Python?'


def test_what_is_no_unicode_is_replaced():
    assert typed("a\udcffb") == "a?b"


def test_ctrl_c_inside_quotes_drops_a_message():
    lines = iter(['"""first'])

    def read_line(prompt: str) -> str:
        for line in lines:
            return line
        raise KeyboardInterrupt

    with pytest.raises(MessageDropped):
        read_message(read_line)


SCRIPT = """
import sys
from pathlib import Path
from bough.cli.chat.line_editor import LineEditor, MessageDropped

with LineEditor(Path(sys.argv[1]), ["/help", "/history", "/show"]) as editor:
    while True:
        try:
            print("read", repr(editor.read_message()))
        except EOFError:
            break
        except MessageDropped:
            print("dropped")
        except KeyboardInterrupt:
            print("interrupted")
"""
MISSED_S = 5.0
UP, TAB, CTRL_D = "\x1b[A", "\t", "\x04"
PASTE = "\x1b[200~one\ntwo\x1b[201~"


class Terminal:
    """A terminal with the line editor in it."""

    def __init__(self, end: int, process: subprocess.Popen[bytes]) -> None:
        self._end, self._process = end, process
        self._shown = ""

    def press(self, keys: str, expected: str) -> None:
        """Type these keys, and wait until the terminal shows this after them."""
        os.write(self._end, keys.encode())
        self.expect(expected)

    def send(self, keys: str, expected: str) -> None:
        """Type these keys and Enter, and wait for this and the next prompt."""
        self.press(f"{keys}\r", expected)
        self.expect(">>> ")

    def interrupt(self, expected: str) -> None:
        """Press Ctrl-C, and wait for this and the next prompt. Python misses a signal that comes just after a key."""
        is_heard = False
        while not is_heard:
            self._process.send_signal(signal.SIGINT)
            is_heard = bool(select.select([self._end], [], [], MISSED_S)[0])
        self.expect(expected)
        self.expect(">>> ")

    def expect(self, expected: str) -> None:
        while expected not in self._shown:
            self._shown += os.read(self._end, 4096).decode().replace("\r", "")
        self._shown = self._shown.partition(expected)[2]


@contextmanager
def terminal(history: Path) -> Iterator[Terminal]:
    end, its_end = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(history)]
    env = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=subprocess.PIPE, env=env) as process:
        os.close(its_end)
        shown = Terminal(end, process)
        try:
            shown.expect(">>> ")
            yield shown
            os.write(end, CTRL_D.encode())
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(end)


def test_ctrl_c_says_whether_something_was_typed(tmp_path):
    with terminal(tmp_path / "history") as shown:
        shown.interrupt("interrupted")
        shown.press("abc", "abc")
        shown.interrupt("dropped")
        shown.interrupt("interrupted")


def test_tab_completes_a_command_at_the_beginning_only(tmp_path):
    with terminal(tmp_path / "history") as shown:
        shown.send(f"/s{TAB}", "read '/show'")
        shown.send(f"x /s{TAB}", "read 'x /s'")


def test_up_recalls_a_message_of_many_lines_whole_also_in_the_next_chat(tmp_path):
    file = tmp_path / "cache" / "history"
    with terminal(file) as shown:
        shown.send(f"{PASTE}", r"read 'one\ntwo'")
        shown.send(f"{UP}", r"read 'one\ntwo'")
        shown.press('"""three\r', "... ")
        shown.send('four"""', r"read 'three\nfour'")
    with terminal(file) as shown:
        shown.send(f"{UP}", r"read 'three\nfour'")
        shown.send(f"{UP}{UP}", r"read 'one\ntwo'")

    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_no_error(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")

    with terminal(tmp_path / "cache" / "history") as shown:
        shown.send("Hello", "read 'Hello'")


def test_without_readline_lines_are_read_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "Hello")

    with LineEditor(tmp_path / "history", [], readline=None) as editor:
        assert editor.read_message() == "Hello"
