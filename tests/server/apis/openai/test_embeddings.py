"""OpenAI's embeddings: every field and error over HTTP, and the clients that people index documents with."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_encoders import DIMENSIONS, vector_of

TEXTS = ["A tree has branches.", "Börsenkurse fallen.", "x"]
IDS = list(b"A tree.")


@pytest.fixture(scope="module")
def http(embedding_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedding_server, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(embedding_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedding_server}/v1", api_key="any", max_retries=0) as made:
        yield made


def expected(text: str | list[int], dimensions: int = DIMENSIONS) -> Any:
    """The vector of a text or of ids as the route must give it, to what 32 bits can tell."""
    kept = vector_of(text.encode() if isinstance(text, str) else text)[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in kept))
    return pytest.approx([number / length for number in kept], rel=1e-6, abs=1e-6)


def embed(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "vectors", **fields})


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("x", ["x"]),
        (TEXTS, TEXTS),
        (IDS, [IDS]),
        ([IDS, [1]], [IDS, [1]]),
    ],
)
def test_texts_and_token_ids_have_a_vector_each(http: httpx.Client, given: Any, texts: list[Any]) -> None:
    answer = embed(http, input=given).json()

    assert [each["embedding"] for each in answer.pop("data")] == [expected(text) for text in texts]
    num_tokens = sum(len(text.encode() if isinstance(text, str) else text) for text in texts)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer == {"object": "list", "model": "vectors", "usage": usage}


def test_entries_are_numbered(http: httpx.Client) -> None:
    data = embed(http, input=["a"] * 100, user="me").json()["data"]

    assert [(each["object"], each["index"]) for each in data] == [("embedding", number) for number in range(100)]


def test_numbers_come_as_base64_if_asked(http: httpx.Client) -> None:
    plain, packed = (
        embed(http, input="A tree.", encoding_format=format).json()["data"][0] for format in ("float", "base64")
    )

    numbers = struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(packed["embedding"]))
    assert numbers == tuple(struct.unpack("f", struct.pack("f", number))[0] for number in plain["embedding"])


def test_fewer_dimensions_are_normalised_again(http: httpx.Client) -> None:
    assert embed(http, input="x", dimensions=3).json()["data"][0]["embedding"] == expected("x", 3)


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(http: httpx.Client) -> None:
    refused, cut = (embed(http, input=["x", "a" * 100], **more) for more in ({}, {"truncate": True}))

    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": (
            "This model's maximum context length is exceeded: input[1]: the prompt has 100 tokens, and the context holds 64"
        ),
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert cut.json()["data"][1]["embedding"] == expected("a" * 64)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [256]}, "input"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 9}, "dimensions"),
        ({"input": "x", "dimensions": "many"}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "user": "u" * 513}, "user"),
        ({"input": "x", "model": ""}, "model"),
    ],
)
def test_what_is_wrong_is_refused_with_its_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = embed(http, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_id_outside_the_vocabulary_is_named(http: httpx.Client) -> None:
    message = embed(http, input=[1, 256]).json()["error"]["message"]

    assert message == "input: the token id 256 is outside the vocabulary of 256"


def test_other_models_are_refused(http: httpx.Client) -> None:
    missing, ranker = embed(http, model="nothing", input="x"), embed(http, model="ranker", input="x")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (ranker.status_code, ranker.json()["error"]["message"]) == (400, "the model ranker makes no embeddings")


# Clients


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openais_own_client_embeds(client: openai.OpenAI, options: Any) -> None:
    found = client.embeddings.create(model="vectors", input=TEXTS, dimensions=4, user="me", **options)

    vectors = [each.embedding for each in found.data]
    if options.get("encoding_format") == "base64":
        vectors = [list(struct.unpack("<4f", base64.b64decode(each))) for each in vectors]  # type: ignore[arg-type]
    assert vectors == [expected(text, 4) for text in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(text.encode()) for text in TEXTS)


def test_openais_own_client_sends_token_ids(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="vectors", input=IDS).data[0].embedding == expected(IDS)
    assert client.embeddings.create(model="vectors", input=[IDS, [1]]).data[1].embedding == expected([1])


def test_openais_own_client_hears_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.embeddings.create(model="vectors", input="a" * 100)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="x")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama"])
def test_litellm_embeds(embedding_server: str, litellm: Any, provider: str) -> None:
    base = embedding_server if provider == "ollama" else f"{embedding_server}/v1"

    found = litellm.embedding(f"{provider}/vectors", TEXTS, api_base=base, api_key="any")

    assert [each["embedding"] for each in found.data] == [expected(text) for text in TEXTS]
    assert found.usage.prompt_tokens == sum(len(text.encode()) for text in TEXTS)


def test_langchain_embeds(embedding_server: str) -> None:
    module = pytest.importorskip("langchain_openai")
    embeddings = module.OpenAIEmbeddings(
        model="vectors", base_url=f"{embedding_server}/v1", api_key="any", check_embedding_ctx_length=False
    )
    with closing(embeddings.client._client):
        assert embeddings.embed_documents(TEXTS) == [expected(text) for text in TEXTS]
        assert embeddings.embed_query("x") == expected("x")


def test_llama_index_embeds(embedding_server: str) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai")
    embeddings = module.OpenAIEmbedding(model_name="vectors", api_base=f"{embedding_server}/v1", api_key="any")
    with closing(embeddings._get_client()):
        assert embeddings.get_text_embedding_batch(TEXTS) == [expected(text) for text in TEXTS]
        assert embeddings.get_query_embedding("x") == expected("x")
