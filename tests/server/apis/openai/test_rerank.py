"""Reranking over HTTP with the bodies of Cohere, Jina and vLLM, and with clients of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

QUERY = "green tree"
DOCUMENTS = ["a red car", "a green tree", "a tree"]
BEST_FIRST = [(1, 1.0), (2, 0.5), (0, 0.0)]


@pytest.fixture(scope="module")
def http(embedding_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedding_server, timeout=30) as opened:
        yield opened


def rerank(http: httpx.Client, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": "ranker", "query": QUERY, "documents": DOCUMENTS, **fields})


def ranked(answer: httpx.Response) -> list[tuple[int, float]]:
    return [(each["index"], each["relevance_score"]) for each in answer.json()["results"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_back_best_first(http: httpx.Client, path: str) -> None:
    answer = rerank(http, path)
    body = answer.json()

    assert ranked(answer) == BEST_FIRST
    assert set(body) == {"id", "model", "results", "usage", "meta"}
    assert body["model"] == "ranker"
    num_tokens = sum(len(QUERY) + len(document) for document in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert body["meta"]["tokens"]["input_tokens"] == num_tokens
    assert all("document" not in each for each in body["results"])


def test_documents_may_be_objects_and_come_back_if_asked(http: httpx.Client) -> None:
    answer = rerank(http, documents=[{"text": text, "id": 7} for text in DOCUMENTS], return_documents=True)

    assert [each["document"] for each in answer.json()["results"]] == [
        {"text": DOCUMENTS[index]} for index, _ in BEST_FIRST
    ]


@pytest.mark.parametrize(("top_n", "length"), [(1, 1), (3, 3), (10, 3), (None, 3)])
def test_only_so_many_of_the_best_are_told(http: httpx.Client, top_n: int | None, length: int) -> None:
    assert ranked(rerank(http, top_n=top_n)) == BEST_FIRST[:length]


def test_of_equal_documents_the_first_comes_first(http: httpx.Client) -> None:
    assert ranked(rerank(http, documents=["tree"] * 100)) == [(number, 0.5) for number in range(100)]


def test_a_document_that_is_too_long_is_cut_unless_it_may_not(http: httpx.Client) -> None:
    documents = ["a tree", "tree " * 20]
    cut, refused = (rerank(http, documents=documents, **more) for more in ({}, {"truncate": False}))

    assert cut.status_code == 200
    assert refused.status_code == 400
    assert "documents[1]: the prompt has 110 tokens, and the context holds 64" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"query": "a" * 16_385}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1]"),
        ({"documents": ["a"] * 2_001}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": "all"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"model": ""}, "model"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_what_is_wrong_is_refused_with_its_name(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    answer = rerank(http, path, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("model", ["vectors", "tiny"])
def test_a_model_that_ranks_nothing_is_refused(http: httpx.Client, model: str) -> None:
    answer = rerank(http, model=model)

    assert answer.status_code == 400
    assert model in answer.json()["error"]["message"]


def test_a_model_that_is_not_there_is_not_found(http: httpx.Client) -> None:
    assert rerank(http, "/rerank", model="nothing").json()["error"]["code"] == "model_not_found"


# Clients


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_litellm_ranks(embedding_server: str, litellm: Any, provider: str) -> None:
    base = f"{embedding_server}/v1" if provider == "hosted_vllm" else embedding_server

    found = litellm.rerank(f"{provider}/ranker", QUERY, DOCUMENTS, top_n=2, api_base=base, api_key="any")

    assert [(each["index"], each["relevance_score"]) for each in found.results] == BEST_FIRST[:2]


def test_coheres_own_client_ranks(embedding_server: str) -> None:
    cohere = pytest.importorskip("cohere")
    more: dict[str, Any]
    for kind, more in ((cohere.Client, {"return_documents": True}), (cohere.ClientV2, {})):
        with httpx.Client() as connections:
            client = kind("any", base_url=embedding_server, httpx_client=connections)
            found = client.rerank(model="ranker", query=QUERY, documents=DOCUMENTS, top_n=2, **more)

        assert [(each.index, each.relevance_score) for each in found.results] == BEST_FIRST[:2]
