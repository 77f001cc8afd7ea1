"""What goes in and out of a terminal: messages, history, control characters, progress."""

from __future__ import annotations

import io
import stat
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from bough.cli.chat.line_input import history, read_message
from bough.cli.terminal.answer import PrefillLine, describe_prefill
from bough.cli.terminal.columns import ago, align, count, memory
from bough.cli.terminal.progress import Lines, show_progress
from bough.cli.terminal.screen import Screen, neutralise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_control_characters_are_made_visible():
    assert neutralise("a\x1b[2Jb\x07\x9bc\x7f\r\n\td") == "a␛[2Jb␇�c␡␍\n\td"


@pytest.mark.parametrize(("out", "expected"), [(Terminal(), "[b]␛[0m"), (io.StringIO(), "[b]\x1b[0m")])
def test_text_goes_to_a_file_as_it_is_and_to_a_terminal_without_control(monkeypatch, out, expected):
    monkeypatch.setattr("sys.stdout", out)

    Screen().write("[b]\x1b[0m")

    assert out.getvalue() == expected


def test_a_line_is_ended_once(capsys):
    screen = Screen()
    for text in ("one", "two\n"):
        screen.write(text)
        screen.end_line()

    assert capsys.readouterr().out == "one\ntwo\n"


def test_an_error_is_one_line_in_a_file_however_long(capsys):
    Screen().error("long " * 40)

    assert capsys.readouterr().err.count("\n") == 1


def test_the_prefill_tells_what_is_computed_and_cached():
    expected = "computing 1,204 of 2,310 prompt tokens · 1,106 cached · 25 %"

    assert describe_prefill(cached=1_106, done=1_407, total=2_310) == expected


def test_the_prefill_shows_on_a_terminal_and_is_silent_elsewhere():
    shown = {}
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        with PrefillLine(console) as line:
            line.report(100, 300)
            line.report(200, 300)
            line.report(300, 300)
        shown[is_terminal] = console.file.getvalue()

    assert "200 of 300 prompt tokens · 100 cached" in shown[True]
    assert shown[False] == ""


def do_work(console: Console, **options) -> str:
    with show_progress(console, **options) as progress:
        progress.start("reading weights", None)  # nobody says when this ends
        progress.start("the [file]", 3_000_000)
        progress.advance(3_000_000)
        progress.finish()
    return console.file.getvalue()


def test_work_on_a_terminal_has_a_bar_with_sizes():
    shown = do_work(Console(file=io.StringIO(), force_terminal=True, width=120))

    assert "reading weights" in shown
    assert "the [file]" in shown and "3.0/3.0 MB" in shown


def test_work_elsewhere_has_lines():
    assert do_work(Console(file=io.StringIO())) == "reading weights\nthe [file] (3.0 MB)\n"
    assert do_work(Console(file=io.StringIO()), stays=False) == "the [file] (3.0 MB)\n"


def test_long_work_is_told_of_every_few_seconds():
    lines: list[str] = []
    now = [0.0]
    progress = Lines(lines.append, clock=lambda: now[0])
    progress.start("the file", 4_000_000)
    for now[0] in (1.0, 6.0, 7.0, 12.0):
        progress.advance(1_000_000)

    assert lines == ["the file (4.0 MB)", "the file: 2.0 MB of 4.0 MB (50 %)", "the file: 4.0 MB of 4.0 MB (100 %)"]


def test_columns_stand_under_each_other():
    assert align([("a", "bb"), ("ccc", "d")]) == ["a     bb", "ccc   d"]


def test_numbers_are_short():
    now = datetime(2030, 1, 2, tzinfo=UTC)

    assert (count(7), count(134_515_008), count(7_600_000_000)) == ("7", "134.5M", "7.6B")
    assert (memory(2**20), memory(3 * 2**30)) == ("1.0 MiB", "3.0 GiB")
    assert ago(now - timedelta(hours=1, minutes=5), now) == "1 hour ago"
    assert ago(now - timedelta(days=3), now) == "3 days ago"
