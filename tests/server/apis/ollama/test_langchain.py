"""LangChain's Ollama client against the server: the way many programs come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ollama import ChatOllama
from ollama import ResponseError

CITY = {
    "title": "City",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


@contextmanager
def opened(server, **options: Any) -> Iterator[ChatOllama]:
    """A chat whose connections are closed afterwards, which it does not do by itself."""
    chat = ChatOllama(model="smollm2", base_url=server.url, temperature=0, **options)
    try:
        yield chat
    finally:
        chat._client.close()


@pytest.fixture
def chat(server) -> Iterator[ChatOllama]:
    with opened(server, num_predict=8, validate_model_on_init=True) as made:
        yield made


def test_it_invokes(chat):
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("Tell me about the history of Paris.")])

    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8


def test_it_streams_what_it_invokes(chat):
    pieces = list(chat.stream("Tell me about the history of Paris."))

    assert len(pieces) > 2
    assert "".join(piece.content for piece in pieces) == chat.invoke("Tell me about the history of Paris.").content


def test_it_gets_structured_output(server):
    with opened(server, num_predict=40) as chat:
        found = chat.with_structured_output(CITY, method="json_schema").invoke("Tell me about the history of Paris.")

    assert set(found) == {"city"}


def test_it_hears_that_the_model_knows_no_tools(chat):
    with pytest.raises(ResponseError, match="does not support tools"):
        chat.bind_tools([weather]).invoke("How is the weather in Paris?")


def test_it_sends_the_history_of_tools(chat):
    called = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Paris"}, "id": "call_1"}])

    answer = chat.invoke([HumanMessage("How is the weather?"), called, ToolMessage("It rains.", tool_call_id="call_1")])

    assert answer.content
