"""Tools: told to the model, forced by a schema, and found in its answers however they are cut into pieces."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import RequestError
from bough.models.answers.tool_calls import ToolCallParser
from bough.models.chat.messages import prepare_messages
from bough.prompting.ask import ToolChoice
from bough.prompting.forced_calls import schema_of_call

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NONE = ToolChoice("none")
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
ASKED = [
    {"role": "user", "content": "And Paris?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
]


def find(pieces, is_forced=False):
    numbers = itertools.count()
    finder = ToolCallParser(
        ["weather", "clock"],
        is_forced=is_forced,
        schemas={"weather": PARAMETERS},
        make_id=lambda: f"call_{next(numbers)}",
    )
    found = [*(finder.add(piece) for piece in pieces), finder.flush()]
    calls = [(call.id, call.name, call.arguments) for each in found for call in each.calls]
    return "".join(each.text for each in found), calls


def calls_of(answer, **options):
    return [(name, arguments) for _, name, arguments in find([answer], **options)[1]]


ONE = [("weather", {"city": "Paris"})]
TWO = [*ONE, ("weather", {"city": "Rome"})]
CODER = "<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
ESCAPED = json.dumps({"name": "weather", "arguments": json.dumps({"city": "Paris"})})
IN_STRING = '{"name": "weather", "arguments": {"city": "a</tool_call>b\n"}}'


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        (f"<tool_call>\n{PARIS}\n</tool_call>", ONE),
        (f"<tool_call>{PARIS}</tool_call>\n<tool_call>{ROME}</tool_call>", TWO),
        (f"<tool_call>{PARIS}", ONE),
        (f"<tool_call>{PARIS}\n<tool_call>{ROME}\n</tool", TWO),
        (f"<tool_call>\n{CODER}\n</tool_call>", [("weather", {"city": "12", "days": 3})]),
        (f"<tool_call>{CODER}", [("weather", {"city": "12", "days": 3})]),
        (f"<tool_call>{IN_STRING}</tool_call>", [("weather", {"city": "a</tool_call>b\n"})]),
        (f"<tool_call>{ESCAPED}</tool_call>", ONE),
        (f"[TOOL_CALLS][{PARIS}, {ROME}]", TWO),
        (f"[TOOL_CALLS] [{PARIS}]", ONE),
        (f" [{PARIS}, {ROME}]\n", TWO),
        (PARIS, ONE),
        (f"{PARIS}; {ROME}", TWO),
        (f"<|python_tag|>{ROME}", TWO[1:]),
        ('{"type": "function", "function": {"name": "clock", "arguments": {}}}', [("clock", {})]),
    ],
)
def test_calls_are_found_in_every_form(answer, calls):
    text, _ = find([answer])

    assert calls_of(answer) == calls
    assert text == ""


@pytest.mark.parametrize(
    "answer",
    [
        "Just text.\n",
        "\n\n",
        "a <tool_call> is a tag",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        "<tool_call><function=unknown></function></tool_call>",
        "<tool_call><function=weather><parameter=city>",
        '{"name": "Alice", "age": 3}',
        '{"answer": 42}',
        f"{PARIS} is what I would write.",
        f"I would write {PARIS}",
        "[1, 2, 3]",
        "[TOOL_CALLS] none",
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "not JSON"}',
        '{"name": "weather", "arguments": {"a": ' + "[" * 5000,
    ],
)
def test_what_is_no_call_of_an_offered_tool_stays_text(answer):
    assert find([answer]) == (answer, [])


def test_text_around_calls_keeps_its_blanks_and_lone_blanks_go():
    both, _ = find([f"I look.\n<tool_call>{PARIS}</tool_call>\nDone."])
    before, _ = find([f"I look.\n\n<tool_call>{PARIS}</tool_call>\n"])
    after, _ = find([f"\n\n<tool_call>{PARIS}</tool_call>\n\nDone."])

    assert (both, before, after) == ("I look.\n\nDone.", "I look.", "Done.")


def test_lone_surrogates_in_arguments_are_replaced():
    assert calls_of('{"name": "weather", "arguments": {"city": "\\ud800"}}') == [("weather", {"city": "\ufffd"})]


def test_a_forced_answer_is_a_call_as_soon_as_it_is_complete():
    finder = ToolCallParser(["weather"], is_forced=True)

    first, second = finder.add(PARIS[:-1]), finder.add(PARIS[-1:])

    assert (first.text, first.calls) == ("", ())
    assert [(call.name, call.arguments) for call in second.calls] == ONE


def test_a_forced_answer_that_was_cut_off_is_text():
    assert find([PARIS[:-3]], is_forced=True) == (PARIS[:-3], [])


def test_without_tools_everything_passes_at_once():
    finder = ToolCallParser([])

    assert finder.add(PARIS).text == PARIS
    assert finder.flush().text == ""


def test_plain_text_and_json_that_is_no_call_stream_on():
    finder = ToolCallParser(["weather"])

    given = [finder.add(piece).text for piece in ("He", "llo,", " a <", "b>", " [x]")]
    other = ToolCallParser(["weather"])

    assert given == ["He", "llo,", " a", " <b>", " [x]"]
    assert other.add('{"nam').text == ""
    assert other.add('e": "Al').text == '{"name": "Al'


def test_every_call_has_an_id_of_its_own():
    first, second = (
        ToolCallParser(["weather"], is_forced=True).add(PARIS),
        ToolCallParser(["weather"], is_forced=True).add(PARIS),
    )

    assert re.fullmatch("call_[0-9a-f]{24}", first.calls[0].id)
    assert first.calls[0].id != second.calls[0].id


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<tool",
            "</",
            "[",
            "]",
            "{",
            "}",
            '"',
            ",",
            ";",
        ),
        *(PARIS, ROME, CODER, ESCAPED, IN_STRING, PARIS[:20], PARIS[20:], CODER[:30], CODER[30:]),
        *("\n", " ", "Hello", "é🙂", '{"name": "Alice"}', '"name": ', '"weather"', "\\ud83d", "true", "1.5e", "-"),
    ]
)


@given(st.lists(PIECES, max_size=8), st.booleans())
def test_the_pieces_of_an_answer_do_not_change_what_is_found(pieces, is_forced):
    answer = "".join(pieces)

    whole = find([answer], is_forced)

    assert find(pieces, is_forced) == whole
    assert find(list(answer), is_forced) == whole


@given(st.text(), st.text())
def test_text_without_calls_passes_unchanged(first, second):
    assert find([first, second]) == (first + second, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), JSON, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_any_arguments_are_found_letter_by_letter(arguments, is_ascii, indent):
    written = json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=is_ascii, indent=indent)

    for answer in (written, f"<tool_call>\n{written}\n</tool_call>", f"[TOOL_CALLS][{written}]"):
        assert find(list(answer)) == ("", [("call_0", "weather", arguments)])


def test_a_template_that_knows_tools_gets_them_and_the_messages_as_they_are():
    prepared = prepare_messages(ASKED, [WEATHER], template_knows_tools=True)

    assert prepared.messages == ASKED
    assert prepared.tools == [WEATHER]


def test_no_tools_are_offered_where_none_may_be_called():
    assert prepare_messages(ASKED, NONE.offer([WEATHER]), template_knows_tools=True).tools is None
    assert prepare_messages(ASKED[:1], NONE.offer([WEATHER]), template_knows_tools=False).messages == ASKED[:1]


def test_other_templates_get_the_tools_before_the_system_text():
    system = {"role": "system", "content": "Be brief."}

    added = prepare_messages(ASKED[:1], [WEATHER, CLOCK], template_knows_tools=False)
    joined = prepare_messages([system, *ASKED[:1]], [WEATHER, CLOCK], template_knows_tools=False)

    assert added.tools is None
    assert added.messages[0]["role"] == "system"
    assert f"\n{json.dumps(WEATHER)}\n{json.dumps(CLOCK)}\n" in added.messages[0]["content"]
    assert joined.messages[0]["content"] == added.messages[0]["content"] + "\n\nBe brief."
    assert joined.messages[1:] == added.messages[1:] == ASKED[:1]


def test_other_templates_get_past_calls_and_results_as_text():
    messages = prepare_messages(ASKED, [], template_knows_tools=False).messages

    assert messages[0] == ASKED[0]
    assert messages[1] == {"role": "assistant", "content": f"I look.\n<tool_call>\n{PARIS}\n</tool_call>"}
    assert messages[2]["role"] == "tool"
    assert messages[2]["content"] == "<tool_response>\nsunny\n</tool_response>"


def test_a_past_call_is_written_as_it_would_be_found():
    messages = prepare_messages(ASKED, [], template_knows_tools=False).messages

    assert calls_of(messages[1]["content"]) == ONE


def test_a_forced_call_has_the_name_and_the_parameters_of_the_tool():
    forced = schema_of_call([WEATHER, CLOCK], "weather")

    assert forced == {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": PARAMETERS},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def test_any_of_the_tools_may_be_the_forced_one():
    forced = schema_of_call([WEATHER, CLOCK])

    assert [each["properties"]["name"]["const"] for each in forced["anyOf"]] == ["weather", "clock"]


def test_references_within_parameters_still_point_to_their_place():
    tree = {"$ref": "#/$defs/tree"}
    parameters = {"properties": {"tree": tree}, "$defs": {"tree": {"type": "object", "properties": {"left": tree}}}}
    tool = {"type": "function", "function": {"name": "grow", "parameters": parameters}}

    forced = schema_of_call([WEATHER, tool])

    place = forced["$defs"]["tool_1"]
    assert forced["anyOf"][1]["properties"]["arguments"] == {"$ref": "#/$defs/tool_1"}
    assert place["properties"]["tree"] == {"$ref": "#/$defs/tool_1/$defs/tree"}
    assert place["$defs"]["tree"]["properties"]["left"] == {"$ref": "#/$defs/tool_1/$defs/tree"}


def test_a_forced_tool_that_was_not_offered_is_refused_with_the_names_of_those_that_were():
    with pytest.raises(RequestError, match="a call of clock is asked for; the tools are: weather"):
        schema_of_call([WEATHER], "clock")
    with pytest.raises(RequestError, match="the tools are: none"):
        schema_of_call([])
