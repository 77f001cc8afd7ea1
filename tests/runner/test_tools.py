"""Tools in the library: prompts as the server has them, calls in answers, and descriptions that are none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from bough import RequestError, Runner
from bough.prompting.ask import Ask
from bough.prompting.prompt import encode_ask
from bough.python_types import describe_tool
from bough.server.apis.openai.chat import OpenAIMessage, read_messages

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"const": "weather"}, "arguments": {"type": "object", "additionalProperties": False}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def asked(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', "{}", ""])
def test_messages_as_openai_has_them_make_the_prompt_that_the_server_makes(runner: Runner, arguments: str) -> None:
    read = read_messages([OpenAIMessage(**message) for message in asked(arguments)])
    served = encode_ask(Ask("m", messages=read, tools=[WEATHER]), runner.runtime.facts).tokens.ids
    assert runner.tokenize(asked(arguments), tools=[WEATHER]) == served


def test_arguments_as_text_and_as_an_object_make_one_prompt(runner: Runner) -> None:
    texts = [runner.tokenize(asked(arguments), tools=[WEATHER]) for arguments in ('{"city": "Rome"}', {"city": "Rome"})]
    assert texts[0] == texts[1]


def test_a_call_in_an_answer_is_found_unless_the_prompt_has_opened_its_thinking(runner: Runner) -> None:
    def calls(prompt: str) -> list[str]:
        answer = runner.generate(prompt, raw=True, tools=[WEATHER], format=CALL_FORMAT, max_tokens=100)
        return [call.name for call in answer.tool_calls]

    assert calls("The weather?") == ["weather"]
    assert calls("The weather? <think>\n") == []


def look_up(word: str) -> str:
    """Look up a word."""
    return word


def test_a_function_makes_the_prompt_that_its_description_makes(runner: Runner) -> None:
    assert runner.tokenize("Hello", tools=[look_up]) == runner.tokenize("Hello", tools=[describe_tool(look_up)])


def test_a_function_and_a_type_are_taken_by_requests_chats_and_forks_and_can_be_saved(
    runner: Runner, tmp_path: Path
) -> None:
    called = CALL_FORMAT | {"properties": CALL_FORMAT["properties"] | {"name": {"const": "look_up"}}}
    answer = runner.generate("Hello", tools=[look_up], format=called, max_tokens=100)
    assert [call.name for call in answer.tool_calls] == ["look_up"], answer

    chat = runner.chat(tools=[look_up], format=Answer, max_tokens=400)
    for each in (chat, chat.fork()):
        assert isinstance(each.send("Is it so?").parse(Answer).yes, bool)
    chat.save(tmp_path / "chat.json")
    assert runner.load_chat(tmp_path / "chat.json").as_dict() == chat.as_dict()


@dataclass
class Answer:
    yes: bool


@pytest.mark.parametrize(
    "tools",
    [
        5,
        WEATHER,
        "weather",
        [5],
        [{}],
        [{"function": None}],
        [{"function": {"name": 5}}],
        [{"name": "a", "of": {1}}],
        [{"name": "a"}],
    ],
)
def test_tools_that_cannot_be_described_are_refused(runner: Runner, tools: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        runner.generate("Hello", tools=tools, max_tokens=1)


@pytest.mark.parametrize(
    "message",
    [
        5,
        {"role": "assistant", "tool_calls": "weather"},
        {"role": "assistant", "tool_calls": [{"name": "weather"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": [1]}}]},
    ],
)
def test_a_message_or_a_call_that_is_none_is_refused_by_its_number(runner: Runner, message: Any) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}, message]
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        runner.generate(messages, max_tokens=1)


def wait() -> None: ...
def toss(side: Literal["head", "tail"]) -> str:
    return side


@pytest.mark.parametrize("choice", ["required", "toss"])
def test_a_call_that_is_required_is_made(runner: Runner, choice: str) -> None:
    answer = runner.generate("Hello", tools=[wait, toss], tool_choice=choice, max_tokens=400)
    (call,) = answer.tool_calls
    assert call.name == "toss" or (choice == "required" and call.name == "wait")
    assert call.arguments.get("side") in (("head", "tail") if call.name == "toss" else (None,))


def test_a_chat_keeps_a_required_call_as_a_call_and_any_other_answer_as_its_text(runner: Runner) -> None:
    chat = runner.chat(tools=[toss], max_tokens=400)
    asked = chat.send("Toss it.", tool_choice="required")
    chat.send([{"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "head"}], max_tokens=3)

    _, called, _, answered = chat.messages
    function = {"name": "toss", "arguments": asked.tool_calls[0].arguments}
    assert called["tool_calls"] == [{"id": asked.tool_calls[0].id, "type": "function", "function": function}]
    assert called["content"] == "" and "tool_calls" not in answered


def test_without_a_choice_the_prompt_offers_the_tools_and_with_none_it_does_not(runner: Runner) -> None:
    def count(**options: Any) -> int:
        return runner.generate("Hello", max_tokens=1, **options).usage.prompt_tokens

    assert count(tools=[WEATHER]) == count(tools=[WEATHER], tool_choice="auto") > count()
    assert count(tools=[WEATHER], tool_choice="none") == count()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": "tide"}, "'tide', and the tools are weather"),
        ({"tool_choice": 5}, "5, and the tools are weather"),
        ({"tool_choice": "required", "tools": None}, "there are no tools"),
        ({"tool_choice": "weather", "format": "json"}, "give one of them"),
    ],
)
def test_a_choice_that_is_none_is_refused(runner: Runner, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        runner.generate("Hello", **{"tools": [WEATHER], **options}, max_tokens=1)
