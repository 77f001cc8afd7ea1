"""Words that wrap at the terminal's width, seen on a small terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bough.cli.terminal.screen import Screen
from bough.cli.terminal.wrap import WordWrap
from tests.cli.terminal.test_terminal import Terminal

CONTROL = re.compile(r"\x1b\[\d*[A-Z]|\n|.")
WORDS = st.text(alphabet="ab\u4e2d-", min_size=1, max_size=9)


def see(written: str) -> list[str]:
    """The lines that a terminal shows which does not wrap by itself."""
    rows: list[list[str]] = [[]]
    for part in CONTROL.findall(written):
        if part == "\n":
            rows.append([])
        elif part.endswith("D") and len(part) > 1:
            num_cells = int(part[2:-1])
            while num_cells > 0:
                num_cells -= cell_len(rows[-1].pop())
            assert num_cells == 0, "the cursor stands inside a wide character"
        elif part != "\x1b[K":
            rows[-1].append(part)
    return ["".join(row) for row in rows]


def wrap(text: str, width: int, piece: int = 1) -> list[str]:
    """What is seen of a text that comes in pieces of this many characters."""
    wrapping = WordWrap()
    return see("".join(wrapping.add(text[at : at + piece], width) for at in range(0, len(text), piece)))


def test_lines_break_at_spaces():
    shown = wrap("the quick brown fox jumps over the dog", 12)

    assert [line.rstrip() for line in shown] == ["the quick", "brown fox", "jumps over", "the dog"]


def test_line_breaks_of_the_text_stay_and_none_is_added_to_them():
    assert wrap("one two \nthree\n\nfour", 9) == ["one two ", "three", "", "four"]
    assert wrap("12345678 \nnext", 9) == ["12345678", "next"]


def test_lines_between_fences_stay_as_they_are():
    text = "```py\nfor each in range(10): print(each)\n  ```\nand on we go"

    assert wrap(text, 12) == ["```py", "for each in range(10): print(each)", "  ```", "and on we ", "go"]


def test_a_word_longer_than_a_line_is_left_to_the_terminal():
    address = "https://example.org/a/long/address"

    assert wrap(f"see {address} now", 12) == ["see ", f"{address} ", "now"]


def test_wide_characters_count_twice_and_may_break_anywhere():
    assert wrap("中文字符中文", 8) == ["中文字", "符中文"]
    assert wrap("ab 👍🏽 👩‍👩‍👧 c", 8) == ["ab 👍🏽 ", "👩‍👩‍👧 c"]


@given(st.lists(st.one_of(WORDS, st.just("\n")), max_size=30), st.integers(20, 40), st.integers(1, 7))
def test_no_line_is_too_long_and_no_word_is_lost_or_broken(words, width, piece):
    text = " ".join(words)

    shown = wrap(text, width, piece)

    assert all(cell_len(line) < width for line in shown)
    assert re.sub(r"\s+", "", "".join(shown)) == re.sub(r"\s+", "", text)


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_the_same_is_seen_however_the_text_is_cut(piece):
    text = "a few words, then 中文 and a newline\nand more words than fit\n"

    assert wrap(text, 11, piece) == wrap(text, 11)


def test_the_width_is_read_again_for_each_piece(monkeypatch):
    out, widths = Terminal(), iter([40, 12])
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(Screen, "width", property(lambda self: next(widths)))
    screen, wrapping = Screen(), WordWrap()

    screen.write("one two three four\n", wrapping)
    screen.write("one two three four", wrapping)

    assert see(out.getvalue()) == ["one two three four", "one two ", "three four"]


def test_piped_text_is_untouched(capsys):
    Screen().write("words " * 40, WordWrap())

    assert capsys.readouterr().out == "words " * 40


def test_a_model_cannot_control_the_terminal_through_the_wrapping(monkeypatch):
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)

    Screen().write("a\x1b[2Jb", WordWrap())

    assert out.getvalue() == "a␛[2Jb"
