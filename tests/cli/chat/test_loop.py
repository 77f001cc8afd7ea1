"""Messages of one and of many lines, and the history of what was typed."""

from __future__ import annotations

import stat

from bough.cli.chat.loop import history, read_message


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


class FakeReadline:
    """Keeps its lines in the file, as readline does."""

    def __init__(self) -> None:
        self.lines = "kept\n"

    def read_history_file(self, file) -> None:
        self.lines = file.read_text()

    def write_history_file(self, file) -> None:
        file.write_text(self.lines)

    def set_history_length(self, length: int) -> None:
        pass

    def parse_and_bind(self, line: str) -> None:
        pass


def test_the_history_is_kept_and_readable_by_its_owner_alone(tmp_path):
    file = tmp_path / "cache" / "history"
    with history(file, FakeReadline()):
        pass
    later = FakeReadline()
    later.lines = ""

    with history(file, later):
        assert later.lines == "kept\n"

    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_no_error(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")

    with history(tmp_path / "cache" / "history", FakeReadline()):
        pass
