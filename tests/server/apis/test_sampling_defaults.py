"""The model's own sampling, and answers that repeat themselves, over HTTP: the same by every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.servers import Address, StartServer

HELLO = [{"role": "user", "content": "Say hello."}]
REPEATING = {"temperature": 0, "frequency_penalty": -2}


@pytest.fixture
def greedy(tiny_server: StartServer) -> Address:
    """The server of a model whose makers say that it never samples."""
    return tiny_server()


def post(server: Address, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={"model": "tiny", "messages": HELLO, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask_each(server: Address, **sampling: Any) -> list[str]:
    """The answers of eight tokens by the three APIs."""
    ollama = post(server, "/api/chat", stream=False, options={"num_predict": 8, **sampling})
    openai = post(server, "/v1/chat/completions", max_tokens=8, **sampling)
    anthropic = post(server, "/v1/messages", max_tokens=8, **sampling)
    return [ollama["message"]["content"], openai["choices"][0]["message"]["content"], anthropic["content"][0]["text"]]


def test_without_sampling_parameters_every_api_samples_as_the_model_says(greedy: Address) -> None:
    (text,) = {*ask_each(greedy), *ask_each(greedy), *ask_each(greedy, temperature=0)[1:]}

    assert text
    assert len({text, *ask_each(greedy, temperature=1), *ask_each(greedy, temperature=1)}) > 1  # a request's own wins


def test_the_description_of_a_model_shows_its_own_sampling(greedy: Address) -> None:
    shown = post(greedy, "/api/show")

    lines = dict(line.split(maxsplit=1) for line in shown["parameters"].splitlines())
    assert lines == {
        "num_ctx": "2048",
        "temperature": "0.0",
        "top_k": "0",
        "top_p": "1.0",
        "repeat_penalty": "1.0",
        "repeat_last_n": "64",
    }
    assert all(f"PARAMETER {name} {value}" in shown["modelfile"] for name, value in lines.items())


def test_an_answer_that_repeats_itself_ends_and_says_so(greedy: Address) -> None:
    ollama = post(greedy, "/api/chat", stream=False, options={**REPEATING, "repeat_last_n": -1, "num_predict": -1})
    openai = post(greedy, "/v1/chat/completions", **REPEATING, max_tokens=1000)["choices"][0]

    assert ollama["done_reason"] == "loop"
    assert 256 <= ollama["eval_count"] < 400
    assert (openai["finish_reason"], openai["finish_details"]["type"]) == ("length", "loop")
