"""Ollama's embeddings: every field and error over HTTP, and the clients that people index documents with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from bough.models import ModelFiles
from tests.server.fake_encoders import DIMENSIONS, MAX_TOKENS, FakeEmbedder, FakeEncoderRuntime, vector_of
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import StartServer
from tests.waiting import BOUND_S, wait_until

TEXTS = ["A tree has branches.", "Börsenkurse fallen.", "x"]


@pytest.fixture(scope="module")
def http(embedding_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedding_server, timeout=30) as opened:
        yield opened


def length_of(vector: list[float]) -> float:
    return math.sqrt(math.fsum(number * number for number in vector))


def normalized(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """The vector of a text as the route must give it."""
    kept = vector_of(text.encode())[:dimensions]
    return [number / length_of(kept) for number in kept]


def close_to(vector: list[float]) -> Any:
    return pytest.approx(vector, rel=1e-6, abs=1e-6)


def embed(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/api/embed", json={"model": "vectors", **fields})


# /api/embed


def test_several_texts_have_a_vector_each_of_length_1_in_their_order(http: httpx.Client) -> None:
    answer = embed(http, input=TEXTS).json()

    assert set(answer) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert answer["model"] == "vectors"
    assert answer["embeddings"] == [close_to(normalized(text)) for text in TEXTS]
    assert answer["prompt_eval_count"] == sum(len(text.encode()) for text in TEXTS)
    assert answer["total_duration"] >= answer["load_duration"] > 0


def test_one_text_has_a_list_of_one_vector(http: httpx.Client) -> None:
    assert embed(http, input="x").json()["embeddings"] == [close_to(normalized("x"))]


def test_more_texts_than_run_at_a_time_come_back_in_their_order(http: httpx.Client) -> None:
    texts = [f"text {number}" for number in range(300)]

    assert embed(http, input=texts).json()["embeddings"] == [close_to(normalized(text)) for text in texts]


@pytest.mark.parametrize("fields", [{}, {"input": None}, {"input": []}, {"input": ""}])
def test_without_a_text_the_model_is_loaded(http: httpx.Client, fields: dict[str, Any]) -> None:
    embed(http, keep_alive=0)
    answer = embed(http, **fields)

    assert answer.status_code == 200
    assert answer.json() == {"model": "vectors", "embeddings": []}
    assert "vectors:latest" in loaded_names(http)


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_without_a_text_and_with_keep_alive_0_it_is_unloaded(http: httpx.Client, path: str) -> None:
    embed(http)
    answer = http.post(path, json={"model": "vectors", "keep_alive": 0})

    assert answer.status_code == 200
    assert "vectors:latest" not in loaded_names(http)


def loaded_names(http: httpx.Client) -> list[str]:
    return [each["name"] for each in http.get("/api/ps").json()["models"]]


def test_keep_alive_says_how_long_the_model_stays(http: httpx.Client) -> None:
    embed(http, input="x", keep_alive=-1)
    (loaded,) = (each for each in http.get("/api/ps").json()["models"] if each["name"] == "vectors:latest")
    embed(http, keep_alive="5m")

    assert loaded["expires_at"] > "2200"
    assert loaded["context_length"] == MAX_TOKENS


@pytest.mark.parametrize("fields", [{}, {"truncate": True}, {"truncate": None}])
def test_a_text_that_is_too_long_is_cut(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = embed(http, input="a" * 100, **fields).json()

    assert answer["embeddings"] == [close_to(normalized("a" * MAX_TOKENS))]
    assert answer["prompt_eval_count"] == MAX_TOKENS


def test_a_text_that_may_not_be_cut_is_refused_with_its_number_and_both_lengths(http: httpx.Client) -> None:
    answer = embed(http, input=["x", "a" * 100], truncate=False)

    assert answer.status_code == 400
    assert answer.json() == {"error": "input[1]: the prompt has 100 tokens, and the context holds 64"}


@pytest.mark.parametrize(
    ("asked", "given"), [(3, 3), (DIMENSIONS, DIMENSIONS), (0, DIMENSIONS), (None, DIMENSIONS), (3.0, 3)]
)
def test_fewer_dimensions_are_normalised_again(http: httpx.Client, asked: Any, given: int) -> None:
    (vector,) = embed(http, input="A tree.", dimensions=asked).json()["embeddings"]

    assert vector == close_to(normalized("A tree.", given))
    assert length_of(vector) == pytest.approx(1, abs=1e-6)


def test_more_dimensions_than_there_are_are_refused_with_both_numbers(http: httpx.Client) -> None:
    answer = embed(http, input="x", dimensions=9)

    assert (answer.status_code, answer.json()) == (400, {"error": "dimensions is 9, and must be from 1 to 8"})


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": 5}, "input"),
        ({"input": [1, 2]}, "input.0"),
        ({"input": ["a", None]}, "input.1"),
        ({"input": {"a": "b"}}, "input"),
        ({"input": "x", "dimensions": -1}, "dimensions"),
        ({"input": "x", "dimensions": 1.5}, "dimensions"),
        ({"input": "x", "truncate": "no"}, "truncate"),
        ({"input": "x", "options": {"num_ctx": "many"}}, "options.num_ctx"),
        ({"input": "x", "keep_alive": "soon"}, "keep_alive"),
        ({"input": ["a", ""]}, r"input\[1\]"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(http: httpx.Client, fields: dict[str, Any], place: str) -> None:
    answer = embed(http, **fields)

    assert answer.status_code == 400
    assert place.replace("\\", "") in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_a_model_that_is_not_there_is_not_found(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": "nothing", "input": "x", "prompt": "x"})

    assert answer.status_code == 404
    assert "nothing" in answer.json()["error"]
    assert http.post(path, json={"input": "x"}).json() == {"error": "model is required"}


def test_a_model_that_ranks_texts_is_refused(http: httpx.Client) -> None:
    answer = embed(http, model="ranker", input="x")

    assert (answer.status_code, answer.json()) == (400, {"error": "the model ranker makes no embeddings"})


def test_an_alias_is_told_by_the_name_that_was_used(http: httpx.Client) -> None:
    answer = embed(http, model="mine", input="x").json()

    assert answer["model"] == "mine"
    assert answer["embeddings"] == [close_to(normalized("x"))]


# /api/embeddings


def test_the_older_route_gives_one_vector_as_the_model_gives_it(http: httpx.Client) -> None:
    answer = http.post("/api/embeddings", json={"model": "vectors", "prompt": "A tree.", "options": {"num_ctx": 5}})

    assert answer.json() == {"embedding": close_to(vector_of(b"A tree."))}


@pytest.mark.parametrize("fields", [{}, {"prompt": ""}, {"prompt": None}])
def test_the_older_route_loads_the_model_without_a_prompt(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post("/api/embeddings", json={"model": "vectors", **fields}).json() == {"embedding": []}


def test_the_older_route_cuts_a_text_that_is_too_long(http: httpx.Client) -> None:
    answer = http.post("/api/embeddings", json={"model": "vectors", "prompt": "a" * 100})

    assert answer.json() == {"embedding": close_to(vector_of(b"a" * MAX_TOKENS))}


def test_the_older_route_takes_one_text_only(http: httpx.Client) -> None:
    answer = http.post("/api/embeddings", json={"model": "vectors", "prompt": ["a"]})

    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"]


async def hang_up(url: str, embedder: FakeEmbedder) -> None:
    """Ask for the texts, and leave when all of them have been queued."""
    async with httpx.AsyncClient(timeout=BOUND_S) as client:
        asking = asyncio.create_task(client.post(f"{url}/api/embed", json={"model": "vectors", "input": TEXTS}))
        await embedder.started.until(lambda: len(embedder.started) == len(TEXTS))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def test_a_client_that_hangs_up_cancels_its_texts(tmp_path: Path) -> None:
    embedder = FakeEmbedder()
    files = ModelFiles("vectors", make_words_folder(tmp_path / "vectors"))
    with serving(files, tmp_path, lambda files, settings: FakeEncoderRuntime(files.name, embedder)) as address:
        embedder.may_run.clear()
        asyncio.run(hang_up(address.url, embedder))
        wait_until(lambda: all(each.is_cancelled() for each in embedder.started))
        embedder.may_run.set()

    assert len(embedder.started) == len(TEXTS)


# A model that embeds is no generator, and has no tree


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/api/generate", {"prompt": "Hello"}),
        ("/tokenize", {"content": "Hello"}),
        ("/api/cache/warm", {"prompt": "Hello"}),
        ("/api/cache/explain", {"prompt": "Hello"}),
    ],
)
def test_what_needs_a_generator_is_refused_for_a_model_that_embeds(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "vectors", **body})

    assert answer.status_code == 400
    assert "the model vectors generates no text" in answer.json()["error"]


def test_what_shows_all_models_goes_on_with_one_that_has_no_tree(http: httpx.Client) -> None:
    embed(http, input=TEXTS)
    answers = [http.get(path) for path in ("/api/ps", "/api/tags", "/api/cache", "/health", "/metrics")]

    assert [answer.status_code for answer in answers] == [200] * 5
    assert 'bough_texts_total{model="vectors"}' in answers[-1].text
    assert http.delete("/api/cache").status_code == 200


# Clients


def test_ollamas_own_client_embeds(embedding_server: str) -> None:
    client = ollama.Client(embedding_server)
    with closing(client):
        found = client.embed("vectors", TEXTS, truncate=True, dimensions=4, keep_alive="5m", options={"num_ctx": 512})
        older = client.embeddings("vectors", "x")
        with pytest.raises(ollama.ResponseError, match="100 tokens, and the context holds 64") as refused:
            client.embed("vectors", "a" * 100, truncate=False)

    assert [list(vector) for vector in found.embeddings] == [close_to(normalized(text, 4)) for text in TEXTS]
    assert found.prompt_eval_count and found.total_duration and found.load_duration
    assert list(older.embedding) == close_to(vector_of(b"x"))
    assert refused.value.status_code == 400


def test_langchain_embeds(embedding_server: str) -> None:
    from langchain_ollama import OllamaEmbeddings

    embeddings = OllamaEmbeddings(model="vectors", base_url=embedding_server, validate_model_on_init=True, num_ctx=512)
    with closing(embeddings._client):
        documents, query = embeddings.embed_documents(TEXTS), embeddings.embed_query("x")
        asyncio.run(embeddings._async_client.close())

    assert documents == [close_to(normalized(text)) for text in TEXTS]
    assert query == close_to(normalized("x"))


def test_llama_index_embeds(embedding_server: str) -> None:
    module = pytest.importorskip("llama_index.embeddings.ollama")
    embeddings = module.OllamaEmbedding(model_name="vectors", base_url=embedding_server)
    with closing(embeddings._client):
        documents, query = embeddings.get_text_embedding_batch(TEXTS), embeddings.get_query_embedding("x")
        asyncio.run(embeddings._async_client.close())

    assert documents == [close_to(normalized(text)) for text in TEXTS]
    assert query == close_to(normalized("x"))


def test_a_generator_embeds_by_its_last_state(http: httpx.Client) -> None:
    (first, second), (again,) = (embed(http, model="tiny", input=texts).json()["embeddings"] for texts in (TEXTS[:2], "x"))

    assert len(first) == len(second) == len(again) > 0
    assert first != second
    assert length_of(first) == pytest.approx(1, abs=1e-6)


def test_texts_leave_room_in_the_queue_for_chats(tiny_server: StartServer) -> None:
    url = tiny_server(lanes=1, queue=2).url
    embedding = {"model": "tiny", "input": [f"text {number}" for number in range(60)]}
    answer = {"model": "tiny", "prompt": "Hello", "stream": False, "options": {"num_predict": 1}}
    with ThreadPoolExecutor(3) as clients:
        httpx.post(f"{url}/api/embed", json={"model": "tiny"}, timeout=60)
        embeddings = [clients.submit(httpx.post, f"{url}/api/embed", json=embedding, timeout=60) for _ in range(3)]
        answers = [httpx.post(f"{url}/api/generate", json=answer, timeout=60) for _ in range(10)]

        assert [each.status_code for each in answers] == [200] * 10
        assert [each.result().status_code for each in embeddings] == [200] * 3
