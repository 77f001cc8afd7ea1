"""Anthropic's own client against a running server."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import pytest

from tests.server.servers import Address

GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Say hello."}]
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
EVENTS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


@pytest.fixture(scope="module")
def client(server: Address) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=120) as made:
        yield made


def ask(client, messages=HELLO, max_tokens=6, **fields):
    return client.messages.create(model="smollm2", max_tokens=max_tokens, messages=messages, extra_body=GREEDY, **fields)


def total(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message_is_answered(client):
    message = ask(client)

    assert (message.type, message.role, message.model) == ("message", "assistant", "smollm2")
    assert message.content[0].text
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 6


def test_counted_tokens_are_those_of_the_message(client):
    prompt = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [*HELLO, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again."}],
        "tools": [WEATHER],
    }

    counted = client.messages.count_tokens(model="smollm2", **prompt)

    assert counted.input_tokens == total(ask(client, max_tokens=1, **prompt).usage)


def test_a_stream_has_the_events_of_the_protocol_and_the_text_of_the_whole(client):
    with client.messages.stream(model="smollm2", max_tokens=6, messages=HELLO, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()

    assert list(dict.fromkeys(kind for kind in kinds if kind in EVENTS)) == EVENTS
    assert message.content[0].text == ask(client).content[0].text
    assert message.usage.output_tokens == 6


def test_a_stream_tells_what_was_cached_at_its_start_and_at_its_end(client):
    whole = ask(client)

    with client.messages.create(model="smollm2", max_tokens=2, messages=HELLO, stream=True) as stream:
        events = list(stream)

    start, end = events[0].message.usage, events[-2].usage
    assert start.cache_read_input_tokens == end.cache_read_input_tokens > 0
    assert total(start) == total(end) == total(whole.usage)


def test_the_raw_stream_names_each_event_by_its_type(server):
    body = {"model": "smollm2", "max_tokens": 3, "messages": HELLO, "stream": True}

    answer = httpx.post(f"{server.url}/v1/messages?beta=true", json=body, timeout=120)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"]
    assert answer.text.startswith('event: message_start\ndata: {"type":"message_start"')
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_any_tool_may_be_the_one_that_must_be_used(client):
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "any"}}

    with client.messages.stream(model="smollm2", max_tokens=40, messages=HELLO, extra_body=GREEDY, **fields) as stream:
        message = stream.get_final_message()

    assert message.stop_reason == "tool_use"
    assert message.content[0].name in ("weather", "clock")
    assert isinstance(message.content[0].input, dict)


def test_thinking_may_be_asked_of_a_model_that_has_none(client):
    thinking = {"type": "enabled", "budget_tokens": 1024}

    assert [block.type for block in ask(client, thinking=thinking).content] == ["text"]


def test_an_accounting_line_does_not_change_the_prompt(client):
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12345;"}
    system = {"type": "text", "text": "Be brief."}

    counts = [
        client.messages.count_tokens(model="smollm2", messages=HELLO, system=each).input_tokens
        for each in ([line, system], [system])
    ]

    assert counts[0] == counts[1]


def test_a_model_that_is_not_there_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="nobody", max_tokens=1, messages=HELLO, stream=True)

    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.body["error"]["message"].startswith("model 'nobody' not found; there are: ")


def test_an_unknown_tool_cannot_be_forced(client):
    with pytest.raises(anthropic.BadRequestError, match="a call of clock is asked for; the tools are: weather"):
        ask(client, tools=[WEATHER], tool_choice={"type": "tool", "name": "clock"})


def test_a_prompt_that_is_too_long_is_refused_with_its_length(client):
    with pytest.raises(anthropic.BadRequestError, match=r"the prompt has 9\d{3} tokens, and the context holds 8192"):
        ask(client, [{"role": "user", "content": "x " * 9000}])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "smollm2"}'])
def test_a_body_that_makes_no_sense_is_an_invalid_request(server, body):
    answer = httpx.post(f"{server.url}/v1/messages", content=body, timeout=60)

    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
