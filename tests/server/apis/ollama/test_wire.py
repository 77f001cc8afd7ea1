"""What Ollama's clients send, read without a model: options, times, messages, formats and tools."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import ValidationError

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.sampling_params import NEUTRAL, TO_THE_END
from bough.server.apis.ollama.wire import (
    NamedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    parse_keep_alive,
    write_time,
)

USER = {"role": "user", "content": "Hello"}


def read_chat(**fields: Any) -> OllamaChatRequest:
    return OllamaChatRequest.model_validate({"model": "m", "messages": [USER], **fields})


def ask_with(**options: Any) -> Ask:
    return read_chat(options=options).to_ask("")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("0", 0.0),
        (2.5, 2.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("+10s", 10.0),
        (-1, math.inf),
        ("-1m", math.inf),
        (10**400, math.inf),
    ],
)
def test_keep_alive_is_seconds_or_a_duration_and_negative_is_for_ever(value, seconds):
    assert parse_keep_alive(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["", "soon", "5", "5 m", "m5", "5m!", "1x", "٣m", True, [], {}, math.nan, "99999999999h", "9" * 400 + "h"]
)
def test_junk_for_keep_alive_is_refused(value):
    with pytest.raises(ValidationError, match="keep_alive"):
        read_chat(keep_alive=value)


def test_without_options_the_defaults_are_those_of_ollama():
    params = read_chat().to_ask("").params

    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
    assert (params.repeat_penalty, params.repeat_last_n) == (1.1, 64)
    assert (params.max_tokens, params.seed, params.stop) == (None, None, ())


def test_options_are_taken_over():
    params = ask_with(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        num_predict=9,
        stop=["a", "b"],
        presence_penalty=1,
        top_n_sigma=1.5,
    ).params

    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 5, 0.5, 0.1)
    assert (params.seed, params.max_tokens, params.stop, params.presence_penalty) == (7, 9, ("a", "b"), 1)
    assert params.top_n_sigma == 1.5


def test_whole_numbers_may_come_as_floats():
    assert ask_with(num_predict=10.0, seed=42.0).params.max_tokens == 10


@pytest.mark.parametrize("limit", [-1, -2])
def test_a_negative_num_predict_is_as_much_as_the_context_holds(limit):
    assert ask_with(num_predict=limit).params.max_tokens == TO_THE_END


def test_options_that_are_not_given_are_left_to_the_model():
    assert read_chat().to_ask("").unset == set(NEUTRAL)
    assert ask_with(temperature=0, num_predict=3, stop="x", top_k=None).unset == set(NEUTRAL) - {"temperature", "stop"}


def test_num_predict_0_generates_nothing():
    assert ask_with(num_predict=0).params.max_tokens == 0


@pytest.mark.parametrize(("seed", "read"), [(-1, None), (-1.0, None), (0, 0), (-2, -2)])
def test_seed_minus_1_is_any_seed(seed, read):
    assert ask_with(seed=seed).params.seed == read


def test_a_single_stop_may_be_a_text():
    assert ask_with(stop="END").params.stop == ("END",)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_of_0_or_less_takes_all(top_k):
    assert ask_with(top_k=top_k).params.top_k == 0


def test_top_p_of_1_or_more_takes_all():
    assert ask_with(top_p=1.5).params.top_p == 1


def test_top_p_of_0_takes_the_likeliest_alone():
    assert 0 < ask_with(top_p=0).params.top_p < 1e-6


def test_num_ctx_is_the_context():
    assert ask_with(num_ctx=512).context_tokens == 512


def test_unknown_options_and_nulls_are_ignored():
    assert ask_with(mirostat=2, nonsense="x", temperature=None, num_gpu=1, use_mmap=None).params.temperature == 0.8


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": math.nan},
        {"top_k": 1.5},
        {"top_k": "40"},
        {"seed": 10**30},
        {"num_predict": []},
        {"num_predict": True},
        {"num_ctx": "2k"},
        {"stop": 5},
        {"stop": [5]},
        {"stop": 0},
        {"num_gpu": "all"},
        {"use_mmap": 1},
        {"min_p": math.inf},
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(option):
    with pytest.raises(ValidationError, match=f"options.{next(iter(option))}"):
        read_chat(options=option)


@pytest.mark.parametrize(
    "option",
    [{"temperature": -1}, {"min_p": 2}, {"repeat_penalty": 0}, {"repeat_last_n": -2}, {"num_ctx": 0}, {"stop": [""]}],
)
def test_an_option_out_of_range_is_refused_by_name(option):
    with pytest.raises(RequestError, match=next(iter(option))):
        ask_with(**option)


@pytest.mark.parametrize("options", ["fast", [], 5, True])
def test_options_must_be_an_object(options):
    with pytest.raises(ValidationError):
        read_chat(options=options)


@pytest.mark.parametrize(
    ("value", "read"), [(None, None), ("", None), ("json", "json"), ({"type": "object"}, {"type": "object"})]
)
def test_format_is_json_a_schema_or_none(value, read):
    assert read_chat(format=value).to_ask("").params.format == read


@pytest.mark.parametrize("value", ["yaml", 5, True, ["json"], False, 0])
def test_another_format_is_refused(value):
    with pytest.raises(ValidationError, match="JSON schema"):
        read_chat(format=value)


@pytest.mark.parametrize(
    ("value", "read"), [(None, None), (False, False), (True, True), ("low", True), ("high", True), ("max", True)]
)
def test_think_is_a_boolean_or_a_depth(value, read):
    assert read_chat(think=value).to_ask("").think is read


@pytest.mark.parametrize("value", ["maximal", 1, "", []])
def test_another_think_is_refused(value):
    with pytest.raises(ValidationError, match="think"):
        read_chat(think=value)


@pytest.mark.parametrize(
    ("fields", "number"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)]
)
def test_logprobs_are_asked_for_by_two_fields(fields, number):
    assert read_chat(**fields).to_ask("").params.logprobs == number


@pytest.mark.parametrize("number", [-1, 21])
def test_more_than_20_top_logprobs_are_refused(number):
    with pytest.raises(ValidationError, match="top_logprobs"):
        read_chat(logprobs=True, top_logprobs=number)


def test_a_chat_streams_and_truncates_unless_told_not_to():
    assert read_chat().streams and read_chat().to_ask("").truncates
    assert not read_chat(stream=False).streams
    assert not read_chat(truncate=False).to_ask("").truncates


def test_the_salt_and_the_time_to_stay_are_passed_on():
    ask = read_chat(keep_alive="2m").to_ask("of mine")

    assert (ask.salt, ask.keep_alive_s) == ("of mine", 120)


def test_tool_messages_keep_arguments_as_objects_and_name_the_tool():
    calls = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "content": "2", "tool_name": "add"}

    read = [message.to_message() for message in read_chat(messages=[USER, calls, result]).messages or ()]

    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert read[1] == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert read[2] == {"role": "tool", "content": "2", "name": "add"}


def test_thinking_of_an_earlier_answer_goes_to_the_template():
    message = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}

    (read,) = read_chat(messages=[message]).messages or ()

    assert read.to_message() == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        "hello",
    ],
)
def test_a_message_that_makes_no_sense_is_refused(message):
    with pytest.raises(ValidationError, match=r"messages\.0"):
        read_chat(messages=[message])


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({}, "function is missing"),
        ({"type": "function"}, "function is missing"),
        ({"type": "web", "function": {"name": "f"}}, "its type is 'web'"),
        ({"function": {"name": ""}}, "function.name is ''"),
        ({"function": {"name": "f"}}, "function.parameters is missing"),
        ({"function": {"name": "f", "parameters": []}}, "function.parameters is a list"),
        ({"function": {"name": "f", "parameters": {"type": "string"}}}, "function.parameters.type is 'string'"),
        ("f", "dictionary"),
    ],
)
def test_a_tool_of_another_shape_is_refused_with_its_place(tool, reason):
    with pytest.raises(ValidationError, match=rf"tools\.0\s.*{reason}"):
        read_chat(tools=[tool])


@pytest.mark.parametrize("field", ["system", "template", "context"])
def test_raw_goes_with_nothing_that_changes_the_prompt(field):
    value = [1] if field == "context" else "x"

    with pytest.raises(RequestError, match="raw mode does not support"):
        OllamaGenerateRequest.model_validate({"model": "m", "prompt": "p", "raw": True, field: value}).check()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("template", "{{ .Prompt }}", "own template"),
        ("images", ["aGk="], "images"),
    ],
)
def test_what_is_not_supported_is_refused(field, value, text):
    with pytest.raises(RequestError, match=text):
        OllamaGenerateRequest.model_validate({"model": "m", "prompt": "p", field: value}).check()


@pytest.mark.parametrize(("field", "value"), [("raw", True), ("system", "x"), ("context", [1])])
def test_a_suffix_goes_with_a_prompt_alone(field, value):
    OllamaGenerateRequest.model_validate({"model": "m", "prompt": "p", "suffix": "s"}).check()

    with pytest.raises(RequestError, match="suffix does not go together"):
        OllamaGenerateRequest.model_validate({"model": "m", "prompt": "p", "suffix": "s", field: value}).check()


def test_a_model_may_be_named_by_the_old_field():
    assert NamedRequest(name="m").wanted == "m"


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": None, "name": ""}])
def test_a_body_that_names_no_model_is_refused(body):
    with pytest.raises(RequestError, match="model is required"):
        _ = NamedRequest.model_validate(body).wanted


def test_times_are_written_in_utc_with_fractions():
    moment = datetime(2024, 5, 6, 7, 8, 9, 120000, timezone(timedelta(hours=2)))

    assert write_time(moment) == "2024-05-06T05:08:09.120000Z"
