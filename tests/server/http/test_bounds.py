"""What a hostile body may not do: every list, text and number in a request is bounded, and the refusal says by how much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from bough.errors import RequestError
from bough.server.apis.anthropic import wire as anthropic_wire
from bough.server.apis.bough.cache import PrefixBody
from bough.server.apis.bough.tokens import DetokenizeRequest, TokenizeRequest
from bough.server.apis.ollama.wire import CopyRequest, EmbedRequest, NamedRequest, OllamaChatRequest, OllamaGenerateRequest
from bough.server.apis.openai import chat as openai_chat
from bough.server.apis.openai import completions as openai_completions
from bough.server.apis.openai import embeddings as openai_embeddings
from bough.server.apis.openai import responses as openai_responses
from bough.server.http import bounds
from bough.server.http.errors import HttpError, to_http_error
from bough.server.http.json_routes import read_json
from bough.types import SamplingParams
from tests.test_docs import ROOT

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "1", "function": {"name": "f", "arguments": {}}}
TEXT_CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
MANY = {str(number): {"type": "string"} for number in range(5_001)}  # with their types, 10,002 values
WIDE = {"type": "object", "properties": MANY}
LONG = {"description": "a" * 300_000}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": ""}] * 8}
TOO_MANY_IDS = [1] * 1_048_577

Read = Callable[..., object]


def ollama(**fields: Any) -> object:
    return OllamaChatRequest.model_validate({"model": "m", "messages": [USER], **fields}).to_ask("")


def generate(**fields: Any) -> object:
    return OllamaGenerateRequest.model_validate({"model": "m", "prompt": "a", **fields}).to_ask("")


def prefix(**fields: Any) -> object:
    return PrefixBody.model_validate(fields)


def tokenize(**fields: Any) -> object:
    return TokenizeRequest.model_validate(fields).to_ask()


def detokenize(**fields: Any) -> object:
    return DetokenizeRequest.model_validate(fields)


def chat(**fields: Any) -> object:
    body = openai_chat.OpenAIChatRequest.model_validate({"model": "m", "messages": [USER], **fields})
    return openai_chat.to_ask(body, "")


def complete(**fields: Any) -> object:
    body = openai_completions.CompletionRequest.model_validate({"model": "m", "prompt": "a", **fields})
    return openai_completions.to_asks(body, "")


def embed(**fields: Any) -> object:
    return EmbedRequest.model_validate({"model": "m", "input": "a", **fields}).to_ask("")


def embed_openai(**fields: Any) -> object:
    body = openai_embeddings.OpenAIEmbeddingsRequest.model_validate({"model": "m", "input": "a", **fields})
    return openai_embeddings.to_embed_ask(body, "")


def rerank(**fields: Any) -> object:
    body = openai_embeddings.RerankRequest.model_validate({"model": "m", "query": "a", "documents": ["a"], **fields})
    return openai_embeddings.to_rerank_ask(body, "")


def respond(**fields: Any) -> object:
    body = openai_responses.ResponseRequest.model_validate({"model": "m", "input": "a", **fields})
    return openai_responses.to_ask(body, "")


def message(**fields: Any) -> object:
    body = anthropic_wire.MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": [USER], **fields})
    return anthropic_wire.to_ask(body, "", think=None)


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def item(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": parameters}


def asked(**fields: Any) -> list[Any]:
    return [{**USER, **fields}]


def said(**fields: Any) -> list[Any]:
    return [{"role": "assistant", "content": "a", **fields}, USER]


TOO_MUCH: list[tuple[Read, dict[str, Any], str, str, str]] = [
    (ollama, {"messages": [USER] * 10_001}, "messages", "10,001", "10,000"),
    (ollama, {"messages": asked(images=[""] * 1_025)}, "messages.0.images", "1,025", "1,024"),
    (ollama, {"messages": said(tool_calls=[CALL] * 1_025)}, "messages.0.tool_calls", "1,025", "1,024"),
    (ollama, {"tools": [FUNCTION] * 1_025}, "tools", "1,025", "1,024"),
    (ollama, {"tools": [tool(WIDE)]}, "tools.0", "10,00", "10,000"),
    (ollama, {"tools": [tool({"properties": dict(list(MANY.items())[:4_000])})] * 10}, "tools", "80,0", "50,000"),
    (ollama, {"format": WIDE}, "format", "10,00", "10,000"),
    (ollama, {"format": LONG}, "format", "300,0", "262,144"),
    (ollama, {"options": {"stop": ["a"] * 65}}, "options.stop", "65", "64"),
    (ollama, {"options": {"stop": ["a" * 1_025]}}, "stop", "1,025", "1,024"),
    (ollama, {"model": "m" * 513}, "model", "513", "512"),
    (ollama, {"keep_alive": "1" * 65}, "keep_alive", "65", "64"),
    (generate, {"context": TOO_MANY_IDS}, "context", "1,048,577", "1,048,576"),
    (generate, {"images": [""] * 1_025}, "images", "1,025", "1,024"),
    (prefix, {"messages": [USER] * 10_001}, "messages", "10,001", "10,000"),
    (prefix, {"prompt": "a", "tools": [FUNCTION] * 1_025}, "tools", "1,025", "1,024"),
    (prefix, {"prompt": "a", "model": "m" * 513}, "model", "513", "512"),
    (tokenize, {"messages": [USER] * 10_001}, "messages", "10,001", "10,000"),
    (tokenize, {"content": "a", "model": "m" * 513}, "model", "513", "512"),
    (tokenize, {"messages": [USER], "tools": [FUNCTION] * 1_025}, "tools", "1,025", "1,024"),
    (detokenize, {"tokens": TOO_MANY_IDS}, "tokens", "1,048,577", "1,048,576"),
    (chat, {"messages": [USER] * 10_001}, "messages", "10,001", "10,000"),
    (chat, {"messages": asked(content=[{"type": "text", "text": ""}] * 10_001)}, r"messages\[0\]", "10,001", "10,000"),
    (chat, {"messages": said(tool_calls=[TEXT_CALL] * 1_025)}, "messages.0.tool_calls", "1,025", "1,024"),
    (chat, {"tools": [FUNCTION] * 1_025}, "tools", "1,025", "1,024"),
    (chat, {"tools": [tool(WIDE)]}, r"tools\[0\].function.parameters", "10,00", "10,000"),
    (chat, {"tools": [tool({}, "n" * 513)]}, r"tools\[0\].function.name", "513", "512"),
    (chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": WIDE}}}, "schema", "10,00", "10,000"),
    (chat, {"stop": ["a"] * 65}, "stop", "65", "64"),
    (chat, {"stop": ["a" * 1_025]}, r"stop\[0\]", "1,025", "1,024"),
    (chat, {"stop": "a" * 1_025}, r"stop\[0\]", "1,025", "1,024"),
    (chat, {"model": "m" * 513}, "model", "513", "512"),
    (chat, {"logit_bias": dict.fromkeys(map(str, range(1_025)), 1)}, "logit_bias", "1,025", "1,024"),
    (complete, {"prompt": TOO_MANY_IDS}, "prompt", "1,048,577", "1,048,576"),
    (complete, {"prompt": [[1] * 600_000] * 2}, "prompt", "1,200,000", "1,048,576"),
    (complete, {"prompt": ["a"] * 2_049}, "prompt", "2,049", "2,048"),
    (complete, {"prompt": ["a"] * 33, "n": 64}, "n ", "2,112", "2,048"),
    (embed, {"input": ["a"] * 8_193}, "input", "8,193", "8,192"),
    (embed, {"model": "m" * 513}, "model", "513", "512"),
    (embed, {"keep_alive": "1" * 65}, "keep_alive", "65", "64"),
    (embed, {"options": {"stop": ["a"] * 65}}, "options.stop", "65", "64"),
    (embed_openai, {"input": ["a"] * 8_193}, "input", "8,193", "8,192"),
    (embed_openai, {"input": [[1]] * 8_193}, "input", "8,193", "8,192"),
    (embed_openai, {"input": TOO_MANY_IDS}, "input", "1,048,577", "1,048,576"),
    (embed_openai, {"input": [[1] * 600_000] * 2}, "input", "1,200,000", "1,048,576"),
    (embed_openai, {"user": "u" * 513}, "user", "513", "512"),
    (embed_openai, {"model": "m" * 513}, "model", "513", "512"),
    (rerank, {"documents": ["a"] * 2_001}, "documents", "2,001", "2,000"),
    (rerank, {"query": "a" * 16_385}, "query", "16,385", "16,384"),
    (rerank, {"model": "m" * 513}, "model", "513", "512"),
    (respond, {"input": [USER] * 10_001}, "input", "10,001", "10,000"),
    (respond, {"input": asked(content=[{"type": "text", "text": ""}] * 10_001)}, r"input\[0\].content", "10,001", "10,000"),
    (respond, {"tools": [item({})] * 1_025}, "tools", "1,025", "1,024"),
    (respond, {"tools": [item(WIDE)]}, r"tools\[0\]", "10,00", "10,000"),
    (respond, {"text": {"format": {"type": "json_schema", "schema": WIDE}}}, "schema", "10,00", "10,000"),
    (respond, {"include": [""] * 65}, "include", "65", "64"),
    (respond, {"metadata": {str(number): "a" for number in range(65)}}, "metadata", "65", "64"),
    (respond, {"metadata": {"a": "a" * 70_000}}, "metadata", "70,001", "65,536"),
    (respond, {"user": "a" * 513}, "user", "513", "512"),
    (message, {"messages": [USER] * 10_001}, "messages", "10,001", "10,000"),
    (
        message,
        {"messages": asked(content=[{"type": "text", "text": ""}] * 10_001)},
        "messages.0.content",
        "10,001",
        "10,000",
    ),
    (message, {"messages": asked(content=[{"type": "text", "text": ""}] * 7_000) * 3}, "messages", "21,000", "20,000"),
    (message, {"messages": asked(content=[RESULT] * 2_500)}, "messages", "22,500", "20,000"),
    (message, {"system": [{"type": "text", "text": ""}] * 10_001}, "system", "10,001", "10,000"),
    (message, {"tools": [{"name": "f", "input_schema": {}}] * 1_025}, "tools", "1,025", "1,024"),
    (message, {"tools": [{"name": "f", "input_schema": WIDE}]}, "tools.0.input_schema", "10,00", "10,000"),
    (message, {"output_config": {"format": {"type": "json_schema", "schema": WIDE}}}, "schema", "10,00", "10,000"),
    (message, {"stop_sequences": ["a"] * 65}, "stop_sequences", "65", "64"),
    (message, {"stop_sequences": ["a" * 1_025]}, "stop", "1,025", "1,024"),
]


def refusal_of(read: Read, fields: dict[str, Any]) -> HttpError:
    """How the route answers: pydantic's errors come to it in FastAPI's."""
    with pytest.raises((RequestError, ValidationError)) as refused:
        read(**fields)
    error = refused.value
    return to_http_error(RequestValidationError(error.errors()) if isinstance(error, ValidationError) else error)


@pytest.mark.parametrize(("read", "fields", "place", "found", "allowed"), TOO_MUCH)
def test_more_than_is_allowed_is_refused_with_the_place_and_both_numbers(
    read: Read, fields: dict[str, Any], place: str, found: str, allowed: str
) -> None:
    http_error = refusal_of(read, fields)

    assert http_error.status == 400
    assert any(name in http_error.text for name in (place, place.replace("\\", "")))
    assert found in http_error.text and f"may have {allowed}" in http_error.text
    assert len(http_error.text) < 500


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (ollama, {"messages": [USER] * 10_000, "options": {"stop": ["a" * 1_024] * 64}}),
        (generate, {"context": [1] * 1_048_576}),
        (chat, {"messages": [USER] * 10_000, "stop": ["a" * 1_024] * 64, "tools": [FUNCTION] * 1_024}),
        (complete, {"prompt": [1] * 1_048_576}),
        (complete, {"prompt": ["a"] * 32, "n": 64}),
        (embed, {"input": ["a"] * 8_192}),
        (embed_openai, {"input": ["a"] * 8_192}),
        (embed_openai, {"input": [1] * 1_048_576}),
        (rerank, {"query": "a" * 16_384, "documents": ["a"] * 2_000}),
        (respond, {"input": [USER] * 10_000}),
        (message, {"messages": [USER] * 10_000, "stop_sequences": ["a" * 1_024] * 64}),
    ],
)
def test_as_much_as_is_allowed_is_taken(read: Read, fields: dict[str, Any]) -> None:
    assert read(**fields)


def test_the_library_bounds_stop_strings_too() -> None:
    with pytest.raises(RequestError, match=r"^stop has 65 entries, and may have 64$"):
        SamplingParams(stop=("a",) * 65)
    with pytest.raises(RequestError, match=r"^stop\[1\] has 1,025 characters, and may have 1,024$"):
        SamplingParams(stop=("a", "b" * 1_025))


def test_the_library_bounds_biases_too() -> None:
    with pytest.raises(RequestError, match=r"^logit_bias has 1,025 entries, and may have 1,024$"):
        SamplingParams(logit_bias=tuple((number, 1.0) for number in range(1_025)))


def test_earlier_calls_may_have_so_many_characters_of_arguments_together() -> None:
    arguments = json.dumps({"text": "a" * 2_000_000})
    calls = [{"id": str(number), "function": {"name": "f", "arguments": arguments}} for number in range(3)]
    items = [{"type": "function_call", "name": "f", "call_id": "1", "arguments": arguments}] * 3

    for http_error in (refusal_of(chat, {"messages": said(tool_calls=calls)}), refusal_of(respond, {"input": items})):
        assert http_error.status == 400
        assert "6,000,03" in http_error.text and "4,194,304" in http_error.text


# Ids


@pytest.mark.parametrize("bad", ["a", 1.5, None, True, [], 2**63, -(2**63) - 1])
def test_ids_of_a_context_are_checked_at_once_and_one_bad_one_is_named_alone(bad: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        OllamaGenerateRequest.model_validate({"model": "m", "context": [1, 2, bad, bad]})

    assert len(refused.value.errors()) == 1
    assert "context" in to_http_error(RequestValidationError(refused.value.errors())).text


def test_ids_of_a_context_may_come_as_floats_without_a_fraction() -> None:
    assert OllamaGenerateRequest.model_validate({"model": "m", "context": [1, 2.0, 3e3]}).context == [1, 2, 3000]


def test_many_bad_entries_are_one_error() -> None:
    models: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (OllamaChatRequest, {"model": "m", "messages": [1] * 9_000}),
        (openai_chat.OpenAIChatRequest, {"model": "m", "messages": [1] * 9_000}),
        (anthropic_wire.CountRequest, {"model": "m", "messages": [1] * 9_000}),
    ]
    for model, body in models:
        with pytest.raises(ValidationError) as refused:
            model.model_validate(body)
        assert len(refused.value.errors()) == 1


# Bodies as a whole


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" + b"1," * 1_100_001 + b"1]", "1,100,002 values"),
        (b"[" + b"[]," * 260_000 + b"1]", "260,001 lists"),
        (b"[" + b'{"a":{}},' * 90_000 + b"1]", "270,001 lists"),
        (b"[" + b"1.5," * 260_000 + b"1]", "260,001 lists"),
        (b"[" + b"1e5," * 260_000 + b"1]", "260,001 lists"),
        (b"{" + b",".join(b'"%d" :1' % number for number in range(260_000)) + b"}", "260,001 lists"),
        (b'["' + b'","' * 1_100_001 + b'"]', "1,100,002 values"),
        (b"[" + b"9" * 4_000 + b"," + b"1," * 200_000 + b"1]", "100 digits"),
    ],
)
def test_a_body_that_would_take_long_to_read_is_refused_unread(
    body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was read"))

    with pytest.raises(RequestError, match=reason):
        read_json(body)


@pytest.mark.parametrize(
    "text", ["a,[b{c:d.e" * 200_000, '\\"[,' * 400_000, "9" * 400_000, "\n\t\\" * 400_000, "中" * 300_000]
)
def test_whatever_stands_in_a_text_is_not_counted(text: str) -> None:
    for is_ascii in (True, False):
        assert read_json(json.dumps({"prompt": text}, ensure_ascii=is_ascii).encode()) == {"prompt": text}


def test_a_million_ids_can_be_read() -> None:
    assert len(read_json(json.dumps({"prompt": list(range(1_048_576))}).encode())["prompt"]) == 1_048_576


def test_a_text_that_never_ends_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        read_json(b'["' + b"a" * 400_000)


# What is said of a large value


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (ollama, {"format": ["a" * 1_000] * 1_000}),
        (ollama, {"think": "a" * 1_000_000}),
        (ollama, {"keep_alive": ["a" * 1_000] * 1_000}),
        (ollama, {"messages": [{"role": "a" * 1_000_000, "content": ""}]}),
        (chat, {"tool_choice": ["a" * 1_000] * 1_000, "tools": [FUNCTION]}),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [tool({}, "n" * 500)] * 1_000}),
        (chat, {"messages": [{"role": "a" * 1_000_000, "content": ""}]}),
        (chat, {"messages": asked(content=[{"type": "a" * 1_000_000}])}),
        (chat, {"stop": {"a": "a" * 1_000_000}}),
        (chat, {"stop": [["a" * 1_000_000]]}),
        (chat, {"tools": [{"type": "a" * 1_000_000}]}),
        (embed, {"input": [{"a": "a" * 1_000_000}]}),
        (embed_openai, {"input": [{"a": "a" * 1_000_000}]}),
        (rerank, {"documents": [{"a": "a" * 1_000_000}]}),
        (rerank, {"documents": [["a" * 1_000_000]]}),
        (rerank, {"rank_fields": "a" * 1_000_000}),
        (respond, {"input": [{"type": "a" * 1_000_000}]}),
        (respond, {"input": asked(role=["a" * 1_000_000])}),
        (message, {"messages": asked(content=[{"type": "a" * 1_000_000}])}),
        (message, {"tools": [{"name": "f", "type": "a" * 1_000_000}]}),
    ],
)
def test_an_error_does_not_repeat_a_large_value(read: Read, fields: dict[str, Any]) -> None:
    assert len(refusal_of(read, fields).text) <= 2_000


def test_the_text_of_an_error_is_cut_wherever_it_comes_from() -> None:
    assert len(HttpError(500, "a" * 1_000_000).text) <= 2_000


@pytest.mark.parametrize("model", [NamedRequest, CopyRequest])
def test_names_of_models_are_bounded_everywhere(model: type[BaseModel]) -> None:
    for field in model.model_fields:
        body = {"source": "a", "destination": "b"} | {field: "m" * 513}
        if field in ("source", "destination", "model", "name"):
            with pytest.raises(ValidationError, match="513"):
                model.model_validate(body)


def test_the_documentation_lists_every_bound() -> None:
    text = (ROOT / "docs" / "server-reference.md").read_text(encoding="utf-8")
    table = text.partition("## Limits of a request")[2].partition("##")[0]
    limits = {name: value for name, value in vars(bounds).items() if name.startswith("MAX_")}

    assert len(limits) > 20
    assert {name for name, value in limits.items() if not re.search(rf"(?<![\d,]){value:,}(?![\d,])", table)} == set()
