"""Anthropic's bodies in our own words, and our events in Anthropic's."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from anthropic.types import Message
from pydantic import ValidationError

from bough.errors import EngineError, RequestError
from bough.prompting.ask import ToolChoice
from bough.sampling_params import NEUTRAL
from bough.server.apis.anthropic.messages import MessageStream, format_error, write_events, write_usage, write_whole
from bough.server.apis.anthropic.wire import CountRequest, MessagesRequest, drop_accounting, read_messages, to_ask
from bough.server.http.errors import HttpError
from bough.server.serving.answer import Answered, Delta, Finished, PromptProgress, Started, ToolCall
from bough.types import Completion, Usage
from tests.server.scripted_answer import LOOP, collect, finish, script

BASE = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
ACCOUNTING = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}


def ask(**fields):
    return to_ask(MessagesRequest(**BASE | fields), "", think=False)


def conversation(*messages, **fields):
    return read_messages(CountRequest(model="m", messages=list(messages), **fields))


def text(words, **more):
    return {"type": "text", "text": words, **more}


def test_defaults_are_those_of_anthropic():
    params = ask().params

    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, set()),
        ({"temperature": 0}, {"temperature"}),
        ({"top_p": 0}, {"temperature", "top_p"}),
        ({"top_k": 0, "stop_sequences": []}, {"top_k", "stop"}),
    ],
)
def test_sampling_that_is_not_given_is_left_to_the_model(given, names):
    assert set(NEUTRAL) - ask(**given).unset == names


def test_sampling_is_carried_over():
    params = ask(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"]).params

    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 7, ("a", "b"))


def test_a_top_p_of_nothing_takes_the_likeliest():
    assert ask(top_p=0).params.temperature == 0


def test_an_output_format_is_a_schema():
    schema = {"type": "object"}

    assert ask(output_config={"format": {"type": "json_schema", "schema": schema}}).params.format == schema


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"model": ""},
        {"temperature": 1.5},
        {"temperature": -0.1},
        {"top_p": 2},
        {"top_k": -1},
        {"tool_choice": {"type": "perhaps"}},
        {"tools": [TOOL | {"name": "a b"}]},
        {"system": 5},
    ],
)
def test_bodies_of_wrong_form_are_refused(fields):
    with pytest.raises(ValidationError):
        MessagesRequest(**BASE | fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools.0 \(bash\) is of the type 'bash_20250124'"),
        ({"tools": [{"name": "weather"}]}, r"tools.0 \(weather\) is without input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name is 'weather', like that of tools.0"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema.type is 'string'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0 has the type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content.0.tool_use_id is missing"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "must have id, name and input"),
        ({"system": [{"type": "document"}]}, "system.0 has the type 'document'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place(fields, reason):
    with pytest.raises(RequestError, match=reason):
        ask(**fields)


def test_fields_that_change_nothing_are_accepted():
    extra = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "betas": ["x"],
        "context_management": {"edits": []},
        "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }

    assert ask(**extra) == ask()


def test_text_and_blocks_are_the_same_conversation():
    cached = text("Hi", cache_control={"type": "ephemeral"})

    blocks = conversation({"role": "user", "content": [cached]}, system=[text("Be brief.")])

    assert blocks == conversation({"role": "user", "content": "Hi"}, system="Be brief.")
    assert blocks == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_the_blocks_of_the_system_text_are_paragraphs():
    messages = conversation({"role": "user", "content": "Hi"}, system=[text("One."), text("Two.")])

    assert messages[0]["content"] == "One.\n\nTwo."


def test_accounting_lines_are_left_out_of_the_system_text():
    assert drop_accounting(f"{ACCOUNTING}\nYou help.") == "You help."
    assert drop_accounting(f"You help.\n{ACCOUNTING}\nA lot.") == "You help.\nA lot."
    user = {"role": "user", "content": "Hi"}
    assert conversation(user, system=[text(ACCOUNTING), text("You help.")]) == conversation(user, system="You help.")
    assert conversation(user, system=ACCOUNTING) == conversation(user)


def test_system_messages_stay_in_their_place():
    messages = conversation(
        {"role": "user", "content": "Hi"}, {"role": "system", "content": "Now rhyme."}, {"role": "user", "content": "Go"}
    )

    assert [each["role"] for each in messages] == ["user", "system", "user"]


def test_calls_and_their_results_become_messages_of_tools():
    messages = conversation(
        {"role": "user", "content": "And Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                text("Here: "),
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sunny")]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                text("thanks"),
            ],
        },
    )

    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "Here: thanks"},
    ]


def test_tools_are_functions():
    parameters = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}

    assert ask(tools=[TOOL | {"type": "custom"}]).tools == [{"type": "function", "function": parameters}]


@pytest.mark.parametrize(
    ("wanted", "choice"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(is_single=True)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_every_choice_of_tools_is_known(wanted, choice):
    assert ask(tools=[TOOL], tool_choice=wanted).tool_choice == choice


def test_input_and_cache_together_are_the_prompt():
    assert write_usage(Usage(prompt_tokens=10, matched_tokens=9, cached_tokens=7, completion_tokens=3)) == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 7,
        "output_tokens": 3,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_type_of_their_status(status, kind):
    assert format_error(HttpError(status, "why")) == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for():
    http_error = HttpError(400, "the prompt has 9 tokens", code="context_length_exceeded")

    assert format_error(http_error)["error"]["message"] == "prompt is too long: the prompt has 9 tokens"


CALL = ToolCall("call_1", "weather", {"city": "Paris"})


def finished(reason="stop", stop=None, calls=()):
    completion = Completion("", (), "stop", Usage(completion_tokens=4), stop=stop)
    return Finished(0, "", "", calls, reason, completion)


def events_of(pieces):
    """The data of the events, each of which has the type of its data as its name."""
    events = []
    for piece in pieces:
        name, data = piece.removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(*deltas, shows_thinking=True, end=None):
    writer = MessageStream(shows_thinking=shows_thinking)
    pieces = [piece for delta in deltas for piece in writer.add(delta)]
    return events_of([*pieces, *writer.finish(end or finished())])


def test_a_stream_starts_fills_and_stops_a_block_for_each_kind_of_content():
    deltas = [Delta(thinking="Hm"), Delta(thinking="."), Delta(text="I "), Delta(text="look"), Delta(tool_calls=(CALL,))]

    events = stream(*deltas, end=finished("tool_calls", calls=(CALL,)))

    kinds = [(each["type"].removeprefix("content_block_"), each.get("index")) for each in events]
    assert kinds == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("stop", 2)),
        *(("message_delta", None), ("message_stop", None)),
    ]
    assert events[3]["delta"] == {"type": "signature_delta", "signature": ""}
    assert events[9]["content_block"] == {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    assert json.loads(events[10]["delta"]["partial_json"]) == {"city": "Paris"}
    assert events[12]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_two_calls_at_once_are_two_blocks():
    events = stream(Delta(tool_calls=(CALL, CALL)))

    assert [each["index"] for each in events if each["type"] == "content_block_start"] == [0, 1]


def test_thinking_that_was_not_asked_for_is_left_out():
    events = stream(Delta(thinking="Hm"), Delta(text="Yes"), shows_thinking=False)

    assert [each["content_block"]["type"] for each in events if "content_block" in each] == ["text"]


def test_an_answer_of_nothing_has_an_empty_text():
    events = stream(end=finished(stop="x"))

    assert [each["type"] for each in events[:2]] == ["content_block_start", "content_block_stop"]
    assert events[2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}


def test_an_answer_that_repeats_itself_is_cut_off_and_the_details_say_why():
    body = SimpleNamespace(model="m", shows_thinking=False)

    whole = write_whole(Answered(script([]).started, (LOOP,)), body)
    streamed = events_of(collect(write_events(script([LOOP]), body)))[-2]["delta"]

    for end in (whole, streamed):
        assert (end["stop_reason"], end["stop_sequence"]) == ("max_tokens", None)
        assert end["stop_details"] == {"type": "loop", "cycle_tokens": 4}
    assert Message.construct(**whole).stop_details.type == "loop"  # as Anthropic's client reads it


def test_only_the_start_tells_of_tokens_that_could_not_be_read_from_disk():
    answer, body = script([finish()]), SimpleNamespace(model="m", shows_thinking=False)

    events = events_of(collect(write_events(answer, body)))

    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert (start["cache_read_input_tokens"], start["input_tokens"], start["output_tokens"]) == (7, 3, 0)
    assert (end["cache_read_input_tokens"], end["input_tokens"], end["output_tokens"]) == (6, 4, 3)
    assert write_whole(Answered(answer.started, (finish(),)), body)["usage"] == end


class FailingAnswer:
    """An answer whose engine fails after a few words."""

    started = Started(Usage(prompt_tokens=3))

    async def __aiter__(self):
        yield PromptProgress(2, 3)
        yield PromptProgress(3, 3)
        yield Delta(text="Once")
        raise EngineError("the engine failed")


def test_a_stream_that_fails_half_way_ends_with_an_error():
    async def collect():
        body = SimpleNamespace(model="m", shows_thinking=False)
        return [piece async for piece in write_events(FailingAnswer(), body)]

    pieces = asyncio.run(collect())

    assert pieces[1] == ": prefill 2/3\n\n"
    events = events_of([pieces[0], *pieces[2:]])
    assert [each["type"] for each in events] == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "the engine failed"}
