"""LiteLLM, which many front ends stand on, by OpenAI's API and by Ollama's."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.servers import Address

HELLO = [{"role": "user", "content": "Say hello."}]
CALL = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_7", "content": "rain"},
]
SCHEMA = {
    "type": "object",
    "properties": {"is_red": {"type": "boolean"}},
    "required": ["is_red"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """LiteLLM warns of its own use of other libraries and leaves an event loop open, and that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        asyncio.set_event_loop(None)
        gc.collect()  # here, or the loop is found by the next test that collects, where warnings fail


@pytest.fixture(params=["openai", "ollama_chat"])
def complete(request: pytest.FixtureRequest, server: Address) -> Any:
    """Asks for a short greedy answer by one of the two APIs."""
    import litellm

    base = f"{server.url}/v1" if request.param == "openai" else server.url

    def create(**fields: Any) -> Any:
        asked = {"messages": HELLO, "temperature": 0, "max_tokens": 6, **fields}
        return litellm.completion(
            model=f"{request.param}/{server.model}", api_base=base, api_key="any", timeout=120, **asked
        )

    return create


def test_an_answer_comes_with_its_usage(complete: Any) -> None:
    answer = complete()

    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 6


def test_a_stream_gives_the_text_of_the_whole_answer(complete: Any) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in complete(stream=True)]

    assert "".join(pieces) == complete().choices[0].message.content


def test_a_history_with_tools_is_answered(complete: Any) -> None:
    assert complete(messages=HISTORY, max_tokens=2).choices[0].message.content is not None


def test_a_schema_shapes_the_answer(complete: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "flag", "schema": SCHEMA, "strict": True}}

    answer = complete(response_format=wanted, max_tokens=24)

    assert set(json.loads(answer.choices[0].message.content)) == {"is_red"}
