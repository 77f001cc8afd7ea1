"""The application as a whole: what is at which path, and how it says that something is not."""

from __future__ import annotations

import re
from itertools import islice

import httpx
import pytest

from bough.server.http.json_routes import api_of
from tests.server.servers import StartServer


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/v2/rerank", "openai"),
        ("/rerank", "openai"),
        ("/api/chat", "ollama"),
        ("/", "ollama"),
        ("/api/cache/tree", "bough"),
        ("/metrics", "bough"),
        ("/elsewhere", "bough"),
    ],
)
def test_every_path_belongs_to_one_api(path: str, api: str) -> None:
    assert api_of(path) == api


@pytest.mark.parametrize(("method", "status"), [("GET", 404), ("POST", 404)])
def test_a_path_that_is_not_there_is_told_in_the_words_of_its_api(
    tiny_server: StartServer, method: str, status: int
) -> None:
    url = tiny_server().url

    ollama, openai, anthropic = (
        httpx.request(method, url + path) for path in ("/api/nothing", "/v1/nothing", "/v1/messages/nothing")
    )

    assert [ollama.status_code, openai.status_code, anthropic.status_code] == [status] * 3
    assert ollama.json() == {"error": f"there is no {method} /api/nothing here"}
    assert openai.json()["error"]["type"] == "invalid_request_error"
    assert anthropic.json()["error"]["type"] == "not_found_error"


def test_a_wrong_method_is_told_with_the_right_one(tiny_server: StartServer) -> None:
    answer = httpx.put(f"{tiny_server().url}/v1/chat/completions")

    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "PUT" in answer.json()["error"]["message"]


def test_the_schema_and_its_page_are_there(tiny_server: StartServer) -> None:
    url = tiny_server().url

    schema = httpx.get(f"{url}/openapi.json").json()

    assert schema["info"]["title"] == "Bough"
    assert {"/api/chat", "/v1/chat/completions", "/v1/messages", "/api/cache/tree", "/metrics"} <= set(schema["paths"])


def test_the_page_on_the_api_loads_nothing_from_elsewhere(tiny_server: StartServer) -> None:
    page = httpx.get(f"{tiny_server().url}/docs")

    links = re.findall(r"""(?:src|href)=["']([^"']+)["']|url: ["']([^"']+)["']""", page.text)
    found = [httpx.get(page.url.join(link)) for pair in links for link in pair if link and not link.startswith("data:")]

    assert {answer.url.host for answer in found} == {page.url.host}
    assert [(answer.status_code, answer.headers["content-type"].partition(";")[0]) for answer in found] == [
        (200, "text/css"),
        (200, "text/javascript"),
        (200, "application/json"),
    ]
    assert "http://" not in page.text and "https://" not in page.text


def test_an_answer_crosses_all_layers_piece_by_piece(tiny_server: StartServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 1900}}

    with httpx.stream("POST", f"{tiny_server().url}/api/chat", json=body) as answer:
        pieces = list(islice(answer.iter_raw(), 3))  # of more than fits into two reads

    assert len(pieces) > 2
    assert answer.headers["request-id"]
