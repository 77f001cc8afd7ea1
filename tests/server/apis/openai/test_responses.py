"""OpenAI's responses, by their translation and with the official client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from bough.errors import EngineError, RequestError
from bough.sampling_params import NEUTRAL
from bough.server.apis.openai.responses import ResponseRequest, read_input, to_ask, write_events, write_whole
from bough.server.serving.answer import Answered, Delta, ScoredToken
from bough.types import SamplingParams
from tests.server.scripted_answer import LOOP, THOUGHT, WEATHER, collect, finish, parse, script
from tests.server.servers import Address

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALLED = {"type": "function_call", "call_id": "call_7", "name": "weather", "arguments": '{"city": "Oslo"}'}
SAID = {"type": "function_call_output", "call_id": "call_7", "output": "rain"}


def body(**fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"model": "smollm2", "input": "Say hello.", **fields})


# Translation


def test_instructions_are_the_first_message() -> None:
    assert read_input("Say hello.", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
    ]


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "input_text", "text": "Say "}, {"type": "input_text", "text": "hello."}]

    assert read_input([{"role": "user", "content": parts}], None) == [{"role": "user", "content": "Say hello."}]


def test_thoughts_and_calls_belong_to_the_message_of_the_assistant() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}

    messages = read_input([{"role": "user", "content": "Rain?"}, thought, CALLED, SAID], None)

    call = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert messages[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_7", "name": "weather"},
    ]


def test_thoughts_before_a_call_stay_with_it_when_the_assistant_has_spoken_before() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    said = {"role": "assistant", "content": "I look."}
    last = {"role": "assistant", "content": "It rains."}
    items = [
        {"role": "user", "content": "Rain?"},
        thought("One. "),
        thought("Two. "),
        said,
        thought("Three."),
        CALLED,
        SAID,
        last,
    ]

    _, first, _, second = read_input(items, None)

    assert first["reasoning_content"] == "One. Two. Three."
    assert second == last


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": 5},
        {**CALLED, "arguments": "{"},
        {**SAID, "call_id": None},
        {"content": "no role"},
        {"role": "wizard", "content": "a"},
        {"role": "tool", "content": "a"},
        "text",
    ],
)
def test_an_item_of_no_use_is_refused_with_its_place(item: Any) -> None:
    with pytest.raises(RequestError, match=r"^input\[1\]"):
        read_input([{"role": "user", "content": "a"}, item], None)


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"background": True}])
def test_what_would_need_a_memory_of_responses_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        to_ask(body(**field), "")


def test_tools_that_openais_servers_run_are_left_out_unless_one_is_asked_for() -> None:
    tools = [{"type": "web_search"}, TOOL, {"type": "namespace", "name": "agents", "tools": []}]

    (tool,) = to_ask(body(tools=tools), "").tools

    assert tool["function"]["name"] == TOOL["name"]
    with pytest.raises(RequestError, match="tool_choice"):
        to_ask(body(tools=tools, tool_choice={"type": "web_search"}), "")


def test_tools_are_written_as_in_every_other_api() -> None:
    (tool,) = to_ask(body(tools=[TOOL]), "").tools

    assert tool["type"] == "function"
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"] == TOOL["parameters"]


# Streams that the default model does not give


def test_a_stream_has_its_events_in_order_and_numbered() -> None:
    answer = script(
        [*THOUGHT, Delta(tool_calls=(WEATHER,)), finish(text="It rains.", thinking="Hm. Yes.", calls=(WEATHER,))]
    )

    events = parse(collect(write_events(answer, body(stream=True))))

    added, done = ("output_item.added", "content_part.added"), ("content_part.done", "output_item.done")
    reasoning = ["reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"]
    message = ["output_text.delta", "output_text.delta", "output_text.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = ["created", "in_progress", *added, *reasoning, *done, *added, *message, *done, *call, "completed"]
    assert [event["type"] for event in events] == [f"response.{each}" for each in expected]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_the_items_of_a_stream_are_those_of_its_response() -> None:
    answer = script([*THOUGHT, Delta(tool_calls=(WEATHER,)), finish(text="It rains.", calls=(WEATHER,))])

    events = parse(collect(write_events(answer, body(stream=True))))

    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[1]["content"][0]["text"] == "It rains."


def test_usage_tells_what_was_read_from_the_cache_and_written_to_it() -> None:
    answer = script([finish()])

    usage = parse(collect(write_events(answer, body(stream=True))))[-1]["response"]["usage"]

    assert usage["input_tokens_details"] == {"cached_tokens": 6, "cache_write_tokens": 3}
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 3, 13)
    assert write_whole(Answered(answer.started, (finish(),)), body())["usage"] == usage


def test_only_a_complete_response_tells_when_it_was_completed() -> None:
    for reason, is_told in (("stop", True), ("length", False)):
        response = parse(collect(write_events(script([finish(reason=reason)]), body(stream=True))))[-1]["response"]

        assert (response["completed_at"] is not None) == is_told


def test_an_answer_that_repeats_itself_is_incomplete_and_the_details_say_why() -> None:
    response = write_whole(Answered(script([]).started, (LOOP,)), body())

    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens", "type": "loop", "cycle_tokens": 4}


def test_a_response_tells_the_sampling_of_the_model_where_the_request_has_none() -> None:
    started = replace(script([]).started, params=SamplingParams(temperature=0.2, top_p=0.9))

    told = write_whole(Answered(started, (finish(),)), body(top_p=0.5))

    assert (told["temperature"], told["top_p"]) == (0.2, 0.5)
    assert to_ask(body(top_p=0.5), "").unset == set(NEUTRAL) - {"top_p"}


def test_tokens_without_text_of_their_own_keep_their_logprobs_in_a_stream() -> None:
    first, second, last = (Delta(text=text, logprobs=(ScoredToken(b"?", -0.5),)) for text in ("", "é", ""))

    events = parse(collect(write_events(script([first, second, last, finish(text="é")]), body(stream=True))))

    told = [len(event["logprobs"]) for event in events if event["type"].startswith("response.output_text")]
    assert told == [2, 3]  # with the text, and when it is done
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 3


def test_a_stream_that_fails_half_way_says_so() -> None:
    answer = script([Delta(text="It ")], failure=EngineError("the engine failed"))

    last = parse(collect(write_events(answer, body(stream=True))))[-1]

    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine failed"}


# With the official client


@pytest.fixture
def respond(client: openai.OpenAI, server: Address) -> Any:
    """Asks for a short greedy response, unless told otherwise."""

    def create(**fields: Any) -> Any:
        defaults: dict[str, Any] = {"model": server.model, "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}
        return client.responses.create(**{**defaults, **fields})

    return create


def test_a_limit_leaves_a_response_incomplete(respond: Any) -> None:
    response = respond(max_output_tokens=2)

    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.store is False


def test_a_stream_gives_the_text_of_the_whole_response(respond: Any) -> None:
    events = list(respond(stream=True))

    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == respond().output_text
    assert events[-1].type == "response.incomplete"


def test_the_clients_own_stream_accepts_the_events(client: openai.OpenAI, server: Address) -> None:
    with client.responses.stream(model=server.model, input="Say yes.", tools=[TOOL], tool_choice="required") as stream:
        final = stream.get_final_response()

    assert final.status == "completed"
    assert json.loads(final.output[-1].arguments)["city"] in ("Oslo", "Rome")


def test_a_schema_shapes_the_text(respond: Any) -> None:
    schema = {"type": "object", "properties": {"is_red": {"type": "boolean"}}, "required": ["is_red"]}
    wanted = {"format": {"type": "json_schema", "name": "flag", "schema": {**schema, "additionalProperties": False}}}

    assert set(json.loads(respond(text=wanted, max_output_tokens=24).output_text)) == {"is_red"}


def test_a_history_with_tools_is_answered(respond: Any) -> None:
    history = [{"role": "user", "content": "Rain in Oslo?"}, CALLED, SAID]

    assert respond(input=history, tools=[TOOL], tool_choice="none", max_output_tokens=2).usage.output_tokens == 2


@pytest.mark.parametrize(
    "field", [{"input": []}, {"input": 5}, {"max_output_tokens": 0}, {"tools": [{"type": "teleport"}]}]
)
def test_a_bad_field_is_refused_by_its_name(respond: Any, field: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(extra_body=field)

    assert str(caught.value.param).startswith(next(iter(field)))


def test_an_unknown_model_is_not_found(respond: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        respond(model="nowhere", stream=True)
