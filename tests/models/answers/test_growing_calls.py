"""A long call that comes in many pieces costs as much to read as it is long, and reads the same however it is cut."""

from __future__ import annotations

import json
import random

import pytest

from bough.models.answers import tool_calls
from bough.models.answers.partial_json import ParsedValue, Scan, read_value
from bough.models.answers.tool_calls import ToolCallParser, ToolCallPiece

SCHEMAS = {"write": {"properties": {"text": {"type": "string"}}}}


def long_call(length: int) -> str:
    text = ('say "{[" \\ ' * length)[:length]
    return json.dumps({"name": "write", "arguments": {"text": text, "more": [{"a": [1, 2]}]}})


def parse(answer: str, cuts: list[int]) -> ToolCallPiece:
    parser = ToolCallParser(["write"], schemas=SCHEMAS, make_id=lambda: "id")
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    found = [*(parser.add(piece) for piece in pieces), parser.flush()]
    return ToolCallPiece("".join(each.text for each in found), tuple(call for each in found for call in each.calls))


FORMS = {
    "marked": lambda length: f"<tool_call>{long_call(length)}</tool_call>",
    "list": lambda length: f"[TOOL_CALLS][{long_call(length)}, {long_call(10)}]",
    "bare": lambda length: "; ".join(long_call(100) for _ in range(length // 100)),
    "no JSON": lambda length: "<tool_call>" + long_call(length).replace('"more":', '"more"'),
}


def count_read(monkeypatch: pytest.MonkeyPatch, answer: str) -> int:
    """How many characters are read, when the answer comes three at a time."""
    counted = [0]

    def read(text: str, start: int) -> ParsedValue:
        counted[0] += len(text) - start
        return read_value(text, start)

    with monkeypatch.context() as patch:
        patch.setattr(tool_calls, "read_value", read)
        parse(answer, list(range(3, len(answer), 3)))
    return counted[0]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_grows_with_the_answer_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    answer = FORMS[form](4_000)

    assert len(answer) < count_read(monkeypatch, answer) + len(long_call(10)) + 2 < 11 * len(answer)


@pytest.mark.parametrize("length", [5, 100, 2_000])
def test_text_that_turns_out_to_be_no_call_is_held_back_for_an_eighth_of_its_length(length: int) -> None:
    wrong = '{"name": "write", "arguments": {"text": "' + "x" * length + '" it'
    parser = ToolCallParser(["write"])

    held = next(end for end, character in enumerate(wrong + " goes on" * length) if parser.add(character).text)

    assert len(wrong) - 2 <= held <= len(wrong) * 9 / 8


def test_the_end_of_a_function_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "<parameter=text>\n" + "x</function>y" * 300 + "\n</parameter>\n"
    answer = f"<tool_call><function=write>{body}</function></tool_call>"
    looked, find_end = [0], ToolCallParser._find_end

    def count(parser: ToolCallParser, position: int, is_end: bool) -> int | None:
        looked[0] += 1
        return find_end(parser, position, is_end)

    monkeypatch.setattr(ToolCallParser, "_find_end", count)
    found = parse(answer, list(range(3, len(answer), 3)))

    assert found.calls[0].arguments == {"text": "x</function>y" * 300}
    assert looked[0] < 3 * 300


ANSWERS = [
    *(form(200) for form in FORMS.values()),
    '<tool_call>{"name": "write", "arguments": {"text": "\\u12"}}</tool_call> text',
    '<tool_call>{"name": "write", "arguments": {"text": "a\\\\"}}</tool_call>',
    '{"name": "write", "arguments": {"text": "]}"}} ; ' + long_call(5) + " and text",
    '<tool_call>{"name": "write"]</tool_call>{"name": "write", "arguments": {}}',
    "<tool_call><function=write><parameter=text>a</function></parameter></function></tool_call>",
    "<tool_call><function=write><parameter=text>a</parameter></function>  </tool_call> then <tool_call>{}",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_however_an_answer_is_cut_it_reads_the_same(answer: str) -> None:
    whole, chance = parse(answer, []), random.Random(answer)
    assert parse(answer, list(range(1, len(answer)))) == whole
    for _ in range(60):
        assert parse(answer, sorted(chance.sample(range(1, len(answer)), chance.randrange(1, 12)))) == whole


@pytest.mark.parametrize("value", ['{"a": "}"}', r'{"a": "\"}"}', r'["\\", [1, {}]]', "[]", '[" \\u005d"]'])
def test_a_scan_is_due_when_the_value_is_complete(value: str) -> None:
    scan = Scan(2)
    due = [end for end in range(3, len(value) + 4) if scan.is_due(("  " + value + "  ")[:end])]

    complete = len(value) + 2
    assert [end for end in due if end >= complete][:1] == [complete]
