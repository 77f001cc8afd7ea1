"""Text, columns, progress and answers on a terminal, in a file and in a pipe."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bough.cli.terminal.answer import PrefillLine, describe_prefill
from bough.cli.terminal.columns import ago, ahead, align, count, describe, wrap
from bough.cli.terminal.progress import Lines, show_progress
from bough.cli.terminal.screen import Screen, neutralise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert ago(now - timedelta(hours=1, minutes=5), now) == "1 hour ago"
    assert ago(now - timedelta(days=3), now) == "3 days ago"


def test_times_ahead_are_told_in_their_largest_unit():
    now = datetime(2026, 1, 1, tzinfo=UTC)

    assert ahead(now + timedelta(seconds=299), now) == "4 minutes from now"
    assert ahead(now + timedelta(hours=1), now) == "1 hour from now"
    assert ahead(now - timedelta(seconds=5), now) == "now"


@given(
    st.lists(st.tuples(*[st.text("abc 字", max_size=30)] * 4), min_size=1, max_size=4),
    st.integers(min_value=60, max_value=120),
)
def test_a_table_is_never_wider_than_the_terminal(rows, width):
    assert max(map(cell_len, align(rows, width))) <= width


def test_a_narrow_table_keeps_the_names_that_may_have_to_be_typed():
    rows = [("TREE", "MODEL", "USED"), ("smollm2-0c8b83c6a4c5", "a-model-with-a-long-name", "3 minutes ago")]

    assert align(rows, 44) == [
        "TREE                  MODEL       USED",
        "smollm2-0c8b83c6a4c5  a-model-w…  3 minutes…",
    ]
    assert align(rows)[1] == "smollm2-0c8b83c6a4c5   a-model-with-a-long-name   3 minutes ago"


def test_long_facts_go_on_below_their_beginning():
    facts = {"folder": "/somewhere", "why": "it is a long story of many words"}

    assert describe(facts, width=30) == [
        "  folder   /somewhere",
        "  why      it is a long story",
        "           of many words",
    ]


@given(st.text("ab ", max_size=200), st.integers(min_value=20, max_value=60))
def test_wrapped_text_fits_and_loses_no_word(text, width):
    lines = wrap(text, "ok: ", width)

    assert max(map(len, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(("ok: " + text).split())


def test_screen_has_no_width_outside_of_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "55")
    monkeypatch.setattr("sys.stdout", Terminal())
    assert Screen().width == 55
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert Screen().width is None
