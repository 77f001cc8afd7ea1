"""Thinking and text of one answer, told apart however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.models.answers.thinking import ThinkingParser

PARTS = st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", "\r\n", " ", "a", "Hello <b>", "é🙂"])


def split(pieces, starts_inside=False):
    splitter = ThinkingParser(starts_inside)
    found = [*(splitter.add(piece) for piece in pieces), splitter.flush()]
    return "".join(each.thinking for each in found), "".join(each.text for each in found)


@pytest.mark.parametrize(
    ("answer", "thinking", "text"),
    [
        ("<think>\nIt is easy.\n</think>\n\nParis.", "It is easy.", "Paris."),
        ("\n <think>a\n\nb</think>Paris.\n", "a\n\nb", "Paris.\n"),
        ("<think>\n\n</think>\n\n    code", "", "    code"),
        ("<think>a</think>\n\n", "a", ""),
        ("<think>cut off\n", "cut off", ""),
        ("\n\nNo thought.\n", "", "\n\nNo thought.\n"),
        ("Paris <think>not now</think>", "", "Paris <think>not now</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<thin", "", "<thin"),
    ],
)
def test_thinking_at_the_start_is_told_from_the_text(answer, thinking, text):
    assert split([answer]) == (thinking, text)


@pytest.mark.parametrize(
    ("answer", "thinking", "text"),
    [
        ("Easy.\n</think>\n\nParis.", "Easy.", "Paris."),
        ("<think>Easy.</think>Paris.", "Easy.", "Paris."),
        ("cut off", "cut off", ""),
        ("</think>Paris.", "", "Paris."),
    ],
)
def test_thinking_that_the_prompt_has_opened_needs_no_marker(answer, thinking, text):
    assert split([answer], starts_inside=True) == (thinking, text)


@given(st.lists(PARTS), st.booleans())
def test_the_pieces_of_an_answer_do_not_change_what_is_found(parts, starts_inside):
    answer = "".join(parts)

    whole = split([answer], starts_inside)

    assert split(parts, starts_inside) == whole
    assert split(list(answer), starts_inside) == whole


def test_text_without_thinking_is_not_held_back():
    splitter = ThinkingParser()

    assert [splitter.add(piece).text for piece in ("Pa", "ris", " <", "b>")] == ["Pa", "ris", " <", "b>"]


def test_thinking_streams_but_for_what_may_be_its_end():
    splitter = ThinkingParser()

    found = [splitter.add(piece) for piece in ("<think>", "\nYes", ",\n", "no</thi", "nk>", "\nOK")]

    assert [each.thinking for each in found] == ["", "Yes", ",", "\nno", "", ""]
    assert [each.text for each in found] == ["", "", "", "", "", "OK"]
