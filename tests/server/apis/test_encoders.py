"""Real encoders over HTTP: vectors and scores are those of transformers, whichever client asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from bough.models import ModelFiles
from bough.server.serving.loaded import start_model
from tests.server.apis.conftest import put_model
from tests.server.in_process import serving

tiny_encoders = pytest.importorskip("tests.tiny_encoders", reason="there are no encoders yet")

TEXTS = ["the cat sleeps", "dog", "a much longer text about the cat and the dog"]
QUERY = "the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tiny_encoders.make_encoder(tmp_path_factory.mktemp("encoders") / "encoder")
    return made


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an encoder and a reranker."""
    data = tmp_path_factory.mktemp("encoder_server")
    put_model(data / "data", "ranker", tiny_encoders.make_reranker)
    with serving(ModelFiles("encoder", folder), data, start_model, threads=2) as address:
        yield address.url


def mean_of(folder: Path, text: str) -> Any:
    """The mean of the last hidden states, of length 1."""
    tokenizer, model = tiny_encoders.make_tokenizer(), AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        state = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return pytest.approx((state / state.norm()).tolist(), abs=1e-5)


def test_clients_of_both_apis_get_the_vectors_of_transformers(url: str, folder: Path) -> None:
    expected = [mean_of(folder, text) for text in TEXTS]

    with closing(ollama.Client(url)) as client:
        found = client.embed("encoder", TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as other:
        packed = other.embeddings.create(model="encoder", input=TEXTS)

    assert [list(vector) for vector in found.embeddings] == expected
    assert [each.embedding for each in packed.data] == expected
    assert found.prompt_eval_count == packed.usage.prompt_tokens


def test_many_texts_of_mixed_lengths_are_each_as_if_alone(url: str, folder: Path) -> None:
    many = [" ".join(["the cat", "dog"][number % 2] for _ in range(1 + number % 9)) for number in range(200)]

    found = httpx.post(f"{url}/api/embed", json={"model": "encoder", "input": many}, timeout=60).json()["embeddings"]

    assert len(found) == 200
    for number in (0, 7, 199):
        assert found[number] == mean_of(folder, many[number])


def test_a_text_that_is_too_long_is_told_with_both_numbers(url: str) -> None:
    body = {"model": "encoder", "input": "cat " * 100}
    cut, refused = (httpx.post(f"{url}/api/embed", json=body | {"truncate": each}) for each in (True, False))

    assert cut.json()["prompt_eval_count"] == tiny_encoders.CONTEXT
    assert refused.status_code == 400
    assert f"102 tokens, and the context holds {tiny_encoders.CONTEXT}" in refused.json()["error"]


def test_documents_are_sorted_by_the_scores_of_transformers(url: str, tmp_path: Path) -> None:
    tokenizer = tiny_encoders.make_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(tiny_encoders.make_reranker(tmp_path)).eval()
    with torch.inference_mode():
        scores = [float(model(**tokenizer(QUERY, text, return_tensors="pt")).logits.sigmoid()) for text in TEXTS]

    body = {"model": "ranker", "query": QUERY, "documents": TEXTS}
    results = httpx.post(f"{url}/v1/rerank", json=body, timeout=60).json()["results"]

    assert [each["index"] for each in results] == sorted(range(3), key=lambda number: -scores[number])
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "encoder", "prompt": "Hello"}),
        ("/v1/chat/completions", {"model": "ranker", "messages": [{"role": "user", "content": "Hello"}]}),
        ("/api/embed", {"model": "ranker", "input": "Hello"}),
        ("/v1/rerank", {"model": "encoder", "query": "a", "documents": ["b"]}),
    ],
)
def test_what_a_model_cannot_do_is_refused_with_its_name(url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)

    assert answer.status_code == 400
    assert f"the model {body['model']}" in answer.text


def test_an_encoder_says_that_it_embeds_and_how_long_its_texts_may_be(url: str) -> None:
    httpx.post(f"{url}/api/embed", json={"model": "encoder"}, timeout=60)

    shown = httpx.post(f"{url}/api/show", json={"model": "encoder"}).json()
    loaded = {each["name"]: each for each in httpx.get(f"{url}/api/ps").json()["models"]}

    assert shown["capabilities"] == ["embedding"]
    assert loaded["encoder:latest"]["context_length"] == tiny_encoders.CONTEXT
