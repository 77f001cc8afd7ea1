"""Chats and prompts by Ollama's API, asked for with Ollama's own client and with plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import ollama
import pytest

from tests.waiting import wait_until

GREEDY = {"temperature": 0, "repeat_penalty": 1, "num_predict": 8}
CHAT = [{"role": "user", "content": "Tell me about the history of Paris."}]
COUNTERS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client(server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as opened:
        yield opened


def post_chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/api/chat", json={"model": "smollm2", "messages": CHAT, "options": GREEDY, **fields})


def post_generate(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/api/generate", json={"model": "smollm2", "prompt": "Say hello.", "options": GREEDY, **fields})


def read_lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_streams_by_itself_what_it_would_give_as_a_whole(http):
    whole = post_chat(http, stream=False).json()

    response = post_chat(http)

    pieces = read_lines(response)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"] != ""
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_counters_are_whole_numbers_above_0_on_the_last_object_alone(http):
    *pieces, last = read_lines(post_chat(http))

    assert all(type(last[name]) is int and last[name] > 0 for name in COUNTERS)
    assert last["done_reason"] == "length"
    assert last["eval_count"] == 8
    assert not any(name in piece for piece in pieces for name in (*COUNTERS, "done_reason"))


def test_every_object_has_the_model_as_it_was_asked_for_and_the_time(http):
    pieces = read_lines(post_chat(http, model="smollm2:latest"))

    assert {piece["model"] for piece in pieces} == {"smollm2:latest"}
    assert all(piece["created_at"].endswith("Z") and datetime.fromisoformat(piece["created_at"]) for piece in pieces)


def test_the_client_chats(client):
    answer = client.chat("smollm2", CHAT, options=GREEDY)

    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.done and answer.eval_count == 8


def test_the_client_streams(client):
    pieces = list(client.chat("smollm2", CHAT, stream=True, options=GREEDY))

    assert len(pieces) > 2
    assert pieces[-1].done_reason == "length"


def test_an_answer_ends_before_a_stop_text(client):
    whole = client.chat("smollm2", CHAT, options=GREEDY).message.content or ""
    stop = whole.split()[2]

    stopped = client.chat("smollm2", CHAT, options={**GREEDY, "stop": [stop]})

    assert stopped.message.content == whole[: whole.index(stop)]
    assert stopped.done_reason == "stop"


def test_num_predict_0_gives_nothing(http):
    answer = post_chat(http, options={"num_predict": 0}, stream=False).json()

    assert (answer["message"]["content"], answer["done_reason"]) == ("", "length")


def test_a_schema_is_kept_to(client):
    answer = client.chat("smollm2", CHAT, format=PERSON, options={"temperature": 0, "num_predict": 60})

    assert set(json.loads(answer.message.content or "")) == {"name", "age"}


def test_a_schema_of_a_class_ends_with_its_last_property(client):
    schema = {name: PERSON[name] for name in ("type", "properties", "required")}  # says nothing of other properties

    answer = client.chat("smollm2", CHAT, format=schema, options={"temperature": 0, "num_predict": 60})

    assert set(json.loads(answer.message.content or "")) == {"name", "age"}


def test_streamed_logprobs_are_those_of_the_whole(http):
    whole = post_chat(http, logprobs=True, stream=False).json()

    pieces = read_lines(post_chat(http, logprobs=True))

    tokens = [each["token"] for piece in pieces for each in piece.get("logprobs", ())]
    assert tokens == [each["token"] for each in whole["logprobs"]]


def test_a_conversation_that_is_too_long_loses_its_oldest_messages(http):
    long = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "Yes."}, *CHAT]

    answer = post_chat(http, messages=long, options={**GREEDY, "num_ctx": 128}, stream=False)

    assert answer.status_code == 200
    assert answer.json()["prompt_eval_count"] < 128
    assert answer.json()["messages_left_out"] == int(answer.headers["x-bough-messages-left-out"]) == 2


def test_a_stream_says_in_its_headers_and_at_its_end_that_messages_were_left_out(http):
    long = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "Yes."}, *CHAT]

    answer = post_chat(http, messages=long, options={**GREEDY, "num_ctx": 128})

    assert answer.headers["x-bough-messages-left-out"] == "2"
    *pieces, last = read_lines(answer)
    assert last["messages_left_out"] == 2 and "text_cut" not in last
    assert not any("messages_left_out" in piece for piece in pieces)


def test_an_answer_to_a_whole_conversation_says_that_nothing_was_left_out(http):
    answer = post_chat(http, stream=False)

    assert answer.json()["messages_left_out"] == 0
    assert not [name for name in answer.headers if name.startswith("x-bough")]


def test_an_answer_says_that_the_beginning_of_its_text_was_cut(http):
    for fields in ({}, {"raw": True}):
        answer = post_generate(http, prompt="word " * 300, options={**GREEDY, "num_ctx": 128}, stream=False, **fields)

        assert answer.json()["text_cut"] is True and answer.json()["messages_left_out"] == 0
        assert answer.headers["x-bough-text-cut"] == "true"


def test_what_a_request_asks_for_in_vain_is_in_the_log_once_and_so_is_the_reason_of_a_refusal(http, caplog):
    options = {**GREEDY, "num_ctx": 1_000_000, "dry_base": 2}
    with caplog.at_level("INFO", "bough"):
        for _ in range(2):
            post_chat(http, options=options, grammar="root ::= x", stream=False)
        post_chat(http, options={"num_ctx": 0})
        wait_until(lambda: any(" 400 " in record.getMessage() for record in caplog.records))  # written after the answer

    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "no effect" in line] == [
        "num_ctx above the context of smollm2 has no effect: 1,000,000 tokens are asked for, and there are 8,192",
        "the field 'options.dry_base' of /api/chat has no effect: this server does not know it",
        "the field 'grammar' of /api/chat has no effect: this server does not know it",
    ]
    [refused] = [line for line in lines if line.startswith("POST /api/chat 400 ")]
    assert refused.endswith("ms: num_ctx is 0, and must be at least 1")


def test_a_conversation_that_is_too_long_is_refused_if_it_must_not_be_cut(http):
    long = [{"role": "user", "content": "word " * 300}, *CHAT]

    answer = post_chat(http, messages=long, options={"num_ctx": 128}, truncate=False)

    assert answer.status_code == 400
    assert "128" in answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [WEATHER]}, "does not support tools"),
        ({"think": True}, '"smollm2" does not support thinking'),
        ({"messages": [{"role": "user", "content": "What is this?", "images": ["aGVsbG8="]}]}, "does not support images"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"format": "xml"}, "JSON schema"),
        ({"format": {"type": "nonsense"}}, ""),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "temperature is -1"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_done_is_refused_before_anything_is_sent(http, fields, text, stream):
    response = post_chat(http, stream=stream, **fields)

    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert text in response.json()["error"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_unknown_model_is_not_found(http, path, stream):
    response = http.post(path, json={"model": "nothing", "messages": CHAT, "prompt": "Hello", "stream": stream})

    assert response.status_code == 404
    assert response.json()["error"].startswith("model 'nothing' not found; there are: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b"{}"])
def test_a_body_that_is_no_request_is_refused(http, body):
    response = http.post("/api/chat", content=body)

    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


def test_thinking_may_be_turned_off_where_there_is_none(http):
    assert post_chat(http, think=False).status_code == 200


def test_the_history_of_tools_is_accepted(http):
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]}

    answer = post_chat(http, messages=[*CHAT, calls, {"role": "tool", "tool_name": "add", "content": "2"}], stream=False)

    assert answer.status_code == 200


def test_the_client_generates(client):
    answer = client.generate("smollm2", "Say hello.", options=GREEDY)

    assert answer.response
    assert answer.eval_count == 8


def test_a_prompt_is_the_chat_with_one_message(http):
    prompt = post_generate(http, system="Be brief.", stream=False).json()

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    chat = post_chat(http, messages=messages, stream=False).json()

    assert prompt["response"] == chat["message"]["content"]
    assert prompt["prompt_eval_count"] == chat["prompt_eval_count"]


def test_a_streamed_prompt_is_that_of_the_whole(http):
    whole = post_generate(http, stream=False).json()

    pieces = read_lines(post_generate(http))

    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert pieces[-1]["context"] == whole["context"]
    assert not any("context" in piece for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"suffix": "}"}, "does not support insert"),
        ({"raw": True, "system": "Be brief."}, "raw mode does not support"),
        ({"context": [10**9]}, "1000000000"),
        ({"context": ["x"]}, "context"),
        ({"images": ["aGVsbG8="]}, "does not support images"),
        ({"think": "high"}, "does not support thinking"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(http, fields, text):
    response = post_generate(http, **fields)

    assert response.status_code == 400
    assert text in response.json()["error"]
