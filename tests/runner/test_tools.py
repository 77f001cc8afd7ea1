"""Tools in the library: prompts as the server has them, calls in answers, and descriptions that are none."""

from __future__ import annotations

from typing import Any

import pytest

from bough import RequestError, Runner
from bough.prompting.ask import Ask
from bough.prompting.prompt import encode_ask
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


@pytest.mark.parametrize(
    "tools",
    [5, WEATHER, "weather", [5], [{}], [{"function": None}], [{"function": {"name": 5}}], [{"name": "a", "of": {1}}]],
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
