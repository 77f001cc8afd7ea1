"""Tokenizing over HTTP, with the bodies of llama.cpp and of vLLM."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from bough.models.files import ModelFiles
from bough.models.tokenizer import Tokenizer, load_tokenizer
from tests.server.servers import Address, StartServer

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(tiny_server: StartServer) -> Address:
    return tiny_server()


@pytest.fixture(scope="module")
def tokenizer(words_model: ModelFiles) -> Tokenizer:
    return load_tokenizer(words_model)


def post(server: Address, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=30)


def test_a_text_becomes_the_tokens_of_the_models_tokenizer_for_both_kinds_of_clients(
    server: Address, tokenizer: Tokenizer
) -> None:
    text = "Hello there, Grüße <|im_end|>"
    ids = tokenizer.encode(text)

    llama = post(server, "/tokenize", content=text).json()
    vllm = post(server, "/tokenize", model="tiny", prompt=text, add_special_tokens=True).json()

    assert llama == vllm == {"tokens": ids, "count": len(ids), "max_model_len": 2048, "token_strs": None}


def test_special_tokens_stay_text_if_they_are_not_to_be_parsed(server: Address, tokenizer: Tokenizer) -> None:
    ids = post(server, "/tokenize", content="a<|im_end|>", parse_special=False).json()["tokens"]

    assert tokenizer.decode(ids) == "a<|im_end|>" and len(ids) > 2


def test_messages_are_those_that_a_chat_would_have(server: Address, tokenizer: Tokenizer) -> None:
    expected = tokenizer.template.render(MESSAGES).ids

    assert post(server, "/tokenize", messages=MESSAGES).json()["tokens"] == expected
    assert post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"] == (
        tokenizer.template.render(MESSAGES, add_generation_prompt=False).ids
    )


def test_pieces_are_texts_or_bytes_where_they_are_part_of_a_character(server: Address) -> None:
    tokens = post(server, "/tokenize", content="Hello €", with_pieces=True).json()["tokens"]
    texts = post(server, "/tokenize", prompt="Hello", return_token_strs=True).json()["token_strs"]

    pieces = [each["piece"] for each in tokens]
    assert [piece for piece in pieces if isinstance(piece, list)]
    assert b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in pieces).decode() == "Hello €"
    assert "".join(texts) == "Hello"


def test_tokens_become_their_text_again_special_ones_included(server: Address) -> None:
    text = "Hello there 🙂<|im_end|>"
    ids = post(server, "/tokenize", content=text).json()["tokens"]

    assert post(server, "/detokenize", tokens=ids).json() == {"content": text, "prompt": text}
    assert post(server, "/detokenize", tokens=[], model="tiny").json()["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/detokenize", {"tokens": [1, 99999]}, "token id 99999 is outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "token id -1 is outside the vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {}, "content, prompt and messages"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content, prompt and messages"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": [{"role": "user"}], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_says_why(server: Address, path: str, body: dict[str, Any], named: str) -> None:
    answer = post(server, path, **body)

    assert answer.status_code == 400
    assert named in answer.json()["error"]


def test_an_unknown_model_is_not_found(server: Address) -> None:
    assert post(server, "/tokenize", model="nowhere", content="a").status_code == 404
