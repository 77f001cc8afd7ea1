"""OpenAI's chat completions and models, by their translation and with the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from bough.errors import EngineError, PromptTooLong, RequestError
from bough.prompting.ask import ToolChoice
from bough.prompting.forced_calls import schema_of_call
from bough.sampling_params import NEUTRAL
from bough.server.apis.openai.chat import OpenAIChatRequest, to_ask, write_events, write_whole
from bough.server.apis.openai.wire import format_error
from bough.server.http.errors import to_http_error
from bough.server.serving.answer import Answered, Delta, PromptProgress
from bough.types import SamplingParams
from tests.server.scripted_answer import LOOP, THOUGHT, WEATHER, collect, finish, parse, script
from tests.server.servers import Address

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def body(**fields: Any) -> OpenAIChatRequest:
    return OpenAIChatRequest.model_validate({"model": "smollm2", "messages": HELLO, **fields})


# Translation


def test_arguments_of_earlier_calls_become_objects_and_a_tools_message_gets_the_tools_name() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    said = {"role": "tool", "tool_call_id": "call_7", "content": [{"type": "text", "text": "rain"}]}

    messages = to_ask(body(messages=[*HELLO, called, said]), "").messages

    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_7", "name": "weather"}


@pytest.mark.parametrize("arguments", ["{", "[]", "[" * 900])
def test_arguments_that_are_no_json_object_are_refused_with_their_place(arguments: str) -> None:
    called = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]}

    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments is"):
        to_ask(body(messages=[*HELLO, called]), "")


def test_the_newer_of_the_two_token_limits_wins() -> None:
    assert to_ask(body(max_tokens=5, max_completion_tokens=7), "").params.max_tokens == 7


def test_a_top_p_of_zero_is_greedy() -> None:
    assert to_ask(body(top_p=0, temperature=1.5), "").params.temperature == 0


def test_without_sampling_fields_openais_defaults_hold() -> None:
    params = to_ask(body(temperature=None, stop=None, seed=None, logit_bias={}), "").params

    assert (params.temperature, params.top_p, params.max_tokens) == (1, 1, None)


def test_biases_come_by_token_ids_as_texts() -> None:
    params = to_ask(body(logit_bias={"50": -100, "7": 2.5}), "").params

    assert params.logit_bias == ((7, 2.5), (50, -100.0))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, set()),
        ({"temperature": 0}, {"temperature"}),
        ({"top_p": 0}, {"temperature", "top_p"}),
        ({"presence_penalty": 0, "frequency_penalty": 1, "stop": "x"}, {"presence_penalty", "frequency_penalty", "stop"}),
        ({"top_k": 5, "min_p": 0, "seed": 3}, {"top_k", "min_p"}),
        ({"repetition_penalty": 1.2}, {"repeat_penalty", "repeat_last_n"}),
    ],
)
def test_sampling_fields_that_are_not_given_are_left_to_the_model(given: dict[str, Any], names: set[str]) -> None:
    assert set(NEUTRAL) - to_ask(body(**given), "").unset == names


def test_sampling_fields_of_vllm_are_taken() -> None:
    params = to_ask(body(top_k=5, min_p=0.1, top_n_sigma=1.5, repetition_penalty=1.2), "").params

    assert (params.top_k, params.min_p, params.top_n_sigma) == (5, 0.1, 1.5)
    assert (params.repeat_penalty, params.repeat_last_n) == (1.2, -1)  # vLLM's penalty is for all tokens so far
    taken = {"top_k": 5, "min_p": 0.1, "top_n_sigma": 1.5, "repeat_penalty": 1.2, "repeat_last_n": -1}
    assert params == SamplingParams(temperature=1.0, **taken)


def test_a_top_k_of_minus_1_takes_all_as_with_vllm() -> None:
    assert to_ask(body(top_k=-1), "").params.top_k == 0


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, ToolChoice("auto")),
        ("none", None, ToolChoice("none")),
        ("required", False, ToolChoice("required", is_single=True)),
        ({"type": "function", "function": {"name": "weather"}}, None, ToolChoice("required", "weather", is_single=True)),
    ],
)
def test_a_tool_choice_is_read(choice: Any, parallel: bool | None, expected: ToolChoice) -> None:
    ask = to_ask(body(tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel), "")

    assert ask.tool_choice == expected
    assert ask.tools == [TOOL]


# Streams that the default model does not give


def test_an_answer_that_repeats_itself_is_cut_off_and_the_details_say_why() -> None:
    answer = script([LOOP])

    last = parse(collect(write_events(answer, body(stream=True))))[-1]["choices"][0]
    (whole,) = write_whole(Answered(answer.started, (LOOP,)), body())["choices"]

    for choice in (last, whole):
        assert (choice["finish_reason"], choice["finish_details"]) == ("length", {"type": "loop", "cycle_tokens": 4})
    assert "finish_details" not in write_whole(Answered(answer.started, (finish(),)), body())["choices"][0]


def test_thinking_streams_apart_from_the_text() -> None:
    chunks = parse(
        collect(write_events(script([*THOUGHT, finish(text="It rains.", thinking="Hm. Yes.")]), body(stream=True)))
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm. Yes."
    assert "".join(delta.get("content", "") for delta in deltas) == "It rains."


def test_calls_of_one_choice_are_numbered_across_the_stream() -> None:
    events = [Delta(tool_calls=(WEATHER,)), Delta(tool_calls=(WEATHER,)), finish(calls=(WEATHER, WEATHER))]

    chunks = parse(collect(write_events(script(events), body(stream=True))))

    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_progress_of_a_long_prompt_is_a_comment() -> None:
    pieces = collect(write_events(script([PromptProgress(512, 6000), finish()]), body(stream=True)))

    assert ": prefill 512/6000\n\n" in pieces


def test_a_stream_of_a_short_prompt_has_nothing_but_data() -> None:
    pieces = collect(write_events(script([PromptProgress(30, 30), Delta(text="Hi"), finish(text="Hi")]), body(stream=True)))

    assert all(piece.startswith("data: ") for piece in pieces)


def test_usage_tells_what_was_really_reused_of_the_prompt_by_the_first_choice() -> None:
    answer, asked = script([finish(1), finish(0)], num_choices=2), body(stream=True, stream_options={"include_usage": True})

    streamed = parse(collect(write_events(answer, asked)))[-1]["usage"]

    assert streamed["prompt_tokens_details"]["cached_tokens"] == 6
    assert (streamed["prompt_tokens"], streamed["completion_tokens"]) == (10, 6)
    assert write_whole(Answered(answer.started, (finish(0), finish(1))), asked)["usage"] == streamed


def test_a_stream_that_fails_half_way_ends_with_the_error() -> None:
    answer = script([Delta(text="It ")], failure=EngineError("the engine failed"))

    pieces = collect(write_events(answer, body(stream=True)))

    assert parse(pieces)[-1] == {
        "error": {"message": "the engine failed", "type": "server_error", "param": None, "code": None}
    }
    assert "[DONE]" not in pieces[-1]


# With the official client


@pytest.fixture
def ask(client: openai.OpenAI, server: Address) -> Any:
    """Asks for a short greedy answer, unless told otherwise."""

    def create(**fields: Any) -> Any:
        defaults: dict[str, Any] = {"model": server.model, "messages": HELLO, "temperature": 0, "max_tokens": 8}
        return client.chat.completions.create(**{**defaults, **fields})

    return create


def test_a_stream_has_one_id_a_role_first_one_end_and_the_usage_last(ask: Any) -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))

    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_gives_the_text_of_the_whole_answer(ask: Any) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]

    assert "".join(pieces) == ask().choices[0].message.content


def test_a_stream_ends_with_the_mark_that_clients_wait_for(server: Address) -> None:
    asked = {"model": server.model, "messages": HELLO, "max_tokens": 2, "stream": True}

    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_several_choices_count_their_prompt_once(ask: Any) -> None:
    two, one = ask(n=2, max_tokens=4, temperature=1, seed=1), ask(max_tokens=4)

    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 8


def test_a_token_limit_is_told(ask: Any) -> None:
    assert ask(max_tokens=2).choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_answer_before_it(ask: Any) -> None:
    text = ask().choices[0].message.content
    stop = text[3:6]

    stopped = ask(stop=[stop])

    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs_are_null_unless_asked_for(ask: Any) -> None:
    assert ask(max_tokens=1).choices[0].logprobs is None


def test_a_required_tool_is_called_with_arguments_of_its_schema(ask: Any) -> None:
    choice = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=64).choices[0]

    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")


def test_a_named_tool_is_called_in_a_stream(ask: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}

    chunks = list(ask(tools=[TOOL], tool_choice=named, max_tokens=64, stream=True))

    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather"
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in ("Oslo", "Rome")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_history_with_tools_is_answered(ask: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    said = {"role": "tool", "tool_call_id": "call_7", "content": "rain"}

    assert ask(messages=[*HELLO, called, said], max_tokens=2).usage.completion_tokens == 2


# Errors


def test_an_unknown_model_is_not_found_streamed_or_not(ask: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(model="nowhere", stream=stream)
        assert caught.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused_with_a_code(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(messages=[{"role": "user", "content": "tree " * 9000}])

    assert caught.value.code == "context_length_exceeded"


BAD = {
    "temperature": {"temperature": 2.1},
    "top_p": {"top_p": -0.1},
    "n": {"n": 0},
    "presence_penalty": {"presence_penalty": 3},
    "frequency_penalty": {"frequency_penalty": -3},
    "top_k": {"top_k": 2.5},
    "min_p": {"min_p": 1.1},
    "top_n_sigma": {"top_n_sigma": -1},
    "repetition_penalty": {"repetition_penalty": 0},
    "max_tokens": {"max_tokens": 0},
    "max_completion_tokens": {"max_completion_tokens": "5"},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "logit_bias": {"logit_bias": {"five": 1}},
    "logit_bias[5]": {"logit_bias": {"5": 101}},
    "messages": {"messages": []},
    "messages[0]": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "response_format.type": {"response_format": {"type": "xml"}},
    "response_format.json_schema": {"response_format": {"type": "json_schema"}},
    "tool_choice": {"tool_choice": "maybe", "tools": [TOOL]},
    "stop": {"stop": 5},
    "tools[0]": {"tools": [{"type": "search"}]},
    "tools[0].function.name": {"tools": [{"type": "function", "function": {}}]},
    "tools[0].function.parameters.type": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    },
    "tools[0].function.parameters": {
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}]
    },
}


@pytest.mark.parametrize("param", BAD)
def test_a_bad_field_is_refused_by_its_name(ask: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(extra_body=BAD[param])

    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    error = format_error(to_http_error(PromptTooLong(9000, 8192)))["error"]

    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is exceeded: the prompt has 9000 tokens")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_tool_choice_that_forces_nothing_needs_no_tools(choice: Any) -> None:
    assert to_ask(body(tool_choice=choice, tools=[]), "").tool_choice == ToolChoice(choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_choice_without_tools_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice is given without tools"):
        to_ask(body(tool_choice=choice), "")


def test_a_tool_that_is_not_there_cannot_be_chosen() -> None:
    with pytest.raises(RequestError, match="tool_choice is 'tide', and the tools are weather"):
        to_ask(body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "tide"}}), "")


def test_rivals_without_logprobs_are_refused(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        ask(top_logprobs=2)


def test_a_schema_that_cannot_be_followed_is_refused(ask: Any) -> None:
    schema = {"name": "odd", "schema": {"type": "unheard-of"}}

    with pytest.raises(openai.BadRequestError):
        ask(response_format={"type": "json_schema", "json_schema": schema})


CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPTIONAL = {**CLOSED, "required": []}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object"}, r"json_schema needs additionalProperties to be false, because strict"),
        ({"properties": {}}, r"json_schema needs additionalProperties to be false, because strict"),
        (OPTIONAL, r"json_schema needs 'a' in required"),
        ({**CLOSED, "properties": {"a": OPTIONAL}}, r"json_schema \(at properties\.a\) needs 'a' in required"),
        ({"type": "array", "items": {"anyOf": [CLOSED, OPTIONAL]}}, r"\(at items\.anyOf\[1\]\) needs 'a'"),
        ({"$ref": "#/$defs/A", "$defs": {"A": OPTIONAL}}, r"\(at \$defs\.A\) needs 'a'"),
    ],
)
def test_a_strict_schema_closes_its_objects_and_requires_what_they_name(schema: dict[str, Any], reason: str) -> None:
    def wanted(**more: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}

    with pytest.raises(RequestError, match=rf"^response_format\.{reason}|^response_format\.json_schema {reason}"):
        to_ask(body(response_format=wanted(strict=True)), "")
    assert to_ask(body(response_format=wanted(strict=False)), "").params.format == schema
    assert to_ask(body(response_format=wanted()), "").params.format == schema


def test_a_strict_schema_that_is_right_is_followed_and_the_rest_of_a_schema_is_data() -> None:
    schema = {**CLOSED, "properties": {"a": {"enum": [{"properties": {}}], "default": {"type": "object"}}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert to_ask(body(response_format=wanted), "").params.format == schema


def test_a_tool_may_leave_out_its_parameters_and_then_has_no_arguments() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    asked = to_ask(body(tools=[tool], tool_choice="required"), "")
    forced = schema_of_call(asked.tools, asked.tool_choice.name)
    assert forced["properties"]["arguments"] == {"properties": {}, "type": "object"}


def test_unknown_fields_are_ignored(ask: Any) -> None:
    extra = {"user": "me", "metadata": {"a": "b"}, "store": True, "reasoning_effort": "low", "unheard_of": [1]}

    assert ask(max_tokens=1, extra_body=extra).usage.completion_tokens == 1


# Models


def test_models_are_listed_and_found_by_their_plain_names(client: openai.OpenAI, server: Address) -> None:
    listed = {model.id: model for model in client.models.list()}

    found = client.models.retrieve(server.model)

    assert found == listed[server.model]
    assert (found.object, found.owned_by) == ("model", "bough")


@pytest.mark.parametrize("name", ["nowhere", "some/where"])
def test_a_model_that_is_not_there_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)

    assert caught.value.code == "model_not_found"
