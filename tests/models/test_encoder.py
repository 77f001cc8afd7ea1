"""Text becomes ids part by part, as if at once; what cannot fit is not begun, and what nobody wants is not finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from bough.errors import PromptTooLong, RequestCancelled
from bough.models import encoder as module
from bough.models.chat.renderer import Renderer
from bough.models.encoder import Encoder, PromptLimit
from bough.models.tokenizer import Tokenizer
from tests.models.tiny_tokenizer import SPECIAL, THINKS, byte_level, sentencepiece

PIECES = [
    *SPECIAL,
    "<think>",
    "</think>",
    "<|im",
    "_end|>",
    "user\n",
    "Hello there",
    " ",
    "\n\n",
    "你好",
    "🙂",
    "x" * 40,
    "1 2",
]
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def overlapping() -> Any:
    """A tokenizer whose special tokens hide in each other, take blanks along, or stand for whole words only."""
    backend = byte_level().backend_tokenizer
    backend.add_special_tokens(
        [
            AddedToken("<|im_start|><|im_end|>", normalized=False, special=True),
            AddedToken("there<|im", normalized=False, special=True),
            AddedToken("</think>", normalized=False, special=True, lstrip=True, rstrip=True),
            AddedToken("Hello", normalized=False, special=True, single_word=True),
        ]
    )
    return backend


BACKENDS = {
    "bytes": byte_level().backend_tokenizer,
    "sentencepiece": sentencepiece().backend_tokenizer,
    "overlapping": overlapping(),
}


class Watched:
    """A tokenizer that notes what it encodes, and has no way to do so with the interpreter's lock held."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        assert name != "encode", "this call stops every other thread"
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.encoded += texts
        return self._backend.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.encoded += texts
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture
def watched() -> Watched:
    return Watched(byte_level().backend_tokenizer)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARS", 8)


@pytest.mark.parametrize("kind", BACKENDS)
@given(text=texts)
@settings(max_examples=150)
def test_parts_give_the_ids_and_offsets_of_the_whole(kind: str, text: str) -> None:
    backend = BACKENDS[kind]
    whole = backend.encode(text, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_CHARS", 8)
        found = Encoder(backend).encode(text)
        number = Encoder(backend).count(text)

    assert found.ids == whole.ids and number == len(whole.ids)
    assert found.ends == [end for _, end in whole.offsets]


@pytest.mark.parametrize("kind", BACKENDS)
@given(text=texts)
@settings(max_examples=100)
def test_a_text_never_has_fewer_tokens_than_its_bytes_tell(kind: str, text: str) -> None:
    encoder, limit = Encoder(BACKENDS[kind]), len(BACKENDS[kind].encode(text, add_special_tokens=False).ids)

    encoder.require_fits(len(text.encode()), PromptLimit(limit))  # does not refuse what fits


STARTS_AND_ENDS = processors.TemplateProcessing(
    single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
)


@pytest.mark.parametrize("processor", [None, processors.ByteLevel(trim_offsets=False), STARTS_AND_ENDS])
@pytest.mark.parametrize("text", ["", "Hello there, how are you?", "1 2 3 你好 <|im_start|> " * 40])
def test_a_text_that_is_too_long_is_cut_as_transformers_does_it(processor: Any, text: str) -> None:
    ours, theirs = byte_level(), byte_level()  # which keeps what it was told last
    for each in (ours, theirs):
        each.backend_tokenizer.post_processor = processor

    for most in (4, 30, 1000):
        found = Encoder(ours.backend_tokenizer).encode_cut(text, most)
        assert found == theirs(text, truncation=True, max_length=most)["input_ids"]


def test_the_end_of_a_text_that_is_cut_is_not_encoded(watched: Watched) -> None:
    encoder = Encoder(watched)

    ids = encoder.encode_cut("Hello there" * 100_000, 10)

    assert ids == encoder.encode_cut("Hello there" * 10, 10)
    assert max(map(len, watched.encoded)) <= 2 * 10 * encoder.token_bytes


def test_a_text_is_cut_before_special_tokens_only(watched: Watched, small_parts: None) -> None:
    Encoder(watched).encode("<|im_start|>user\nHello there<|im_end|>\n" * 3)

    assert len(watched.encoded) > 3
    assert all(part.startswith("<|im_") for part in watched.encoded)
    assert "".join(watched.encoded) == "<|im_start|>user\nHello there<|im_end|>\n" * 3


@pytest.mark.parametrize("encode", [Encoder.encode, Encoder.count, Encoder.encode_whole])
def test_what_cannot_fit_is_refused_before_it_is_encoded(watched: Watched, encode: Callable[..., Any]) -> None:
    encoder = Encoder(watched)
    text = "x" * (encoder.token_bytes * 10 + 1)

    with pytest.raises(PromptTooLong, match="at least 11 tokens, and the context holds 10"):
        encode(encoder, text, PromptLimit(10))
    assert watched.encoded == []


def test_what_is_a_little_too_long_is_told_exactly(watched: Watched) -> None:
    text = "1 2 3 " * 3
    number = Encoder(watched).count(text)

    with pytest.raises(PromptTooLong, match=f"has {number} tokens, and the context holds {number - 1}"):
        Encoder(watched).encode(text, PromptLimit(number - 1))
    assert len(Encoder(watched).encode(text, PromptLimit(number)).ids) == number


def test_what_is_far_too_long_is_not_encoded_to_its_end(watched: Watched, small_parts: None) -> None:
    with pytest.raises(PromptTooLong) as found:
        Encoder(watched).encode("<|im_end|>1 2 3 4 " * 100, PromptLimit(20))

    assert found.value.is_least and found.value.prompt_tokens > 80
    assert len(watched.encoded) < 20


def test_a_cancelled_request_ends_between_two_parts(watched: Watched, small_parts: None) -> None:
    with pytest.raises(RequestCancelled):
        Encoder(watched).encode("<|im_end|>1 2 3 4 " * 100, PromptLimit(None, lambda: len(watched.encoded) >= 3))

    assert len(watched.encoded) == 3


def test_a_cancelled_request_ends_among_control_tokens_that_its_client_typed(watched: Watched) -> None:
    hf = byte_level()
    tokenizer = watched_tokenizer(hf, watched)
    with pytest.raises(RequestCancelled):
        tokenizer.template.render(
            [{"role": "user", "content": "<|im_end|>1 2 " * 100}],
            limit=PromptLimit(None, lambda: len(watched.encoded) >= 3),
        )

    assert 3 <= len(watched.encoded) < 20


def watched_tokenizer(hf: Any, watched: Watched) -> Any:
    made = Tokenizer(hf)
    made.encoder = Encoder(watched)  # type: ignore[misc]
    return made


def test_messages_that_cannot_fit_are_refused_before_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = byte_level()
    monkeypatch.setattr(Renderer, "render", lambda *arguments: pytest.fail("it was rendered"))
    tokenizer = watched_tokenizer(hf, Watched(hf.backend_tokenizer))

    with pytest.raises(PromptTooLong, match="at least"):
        tokenizer.template.render([{"role": "user", "content": "x" * 10_000}], limit=PromptLimit(10))


def test_what_a_template_leaves_out_does_not_count() -> None:
    tokenizer = Tokenizer(byte_level(THINKS))
    thought = {"role": "assistant", "content": "<think>" + "so " * 4000 + "</think>Yes."}

    rendered = tokenizer.template.render(
        [{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}], limit=PromptLimit(100)
    )

    assert len(rendered.ids) <= 100


def test_special_tokens_that_were_typed_are_counted_as_they_are_encoded() -> None:
    tokenizer = Tokenizer(byte_level())
    chat = [{"role": "user", "content": "what is <|im_end|> and <|im_start|>?"}] * 3

    assert tokenizer.template.count(chat) == len(tokenizer.template.render(chat).ids)
    assert tokenizer.template.count(chat, prefill="so <|im_end|>") == len(
        tokenizer.template.render(chat, prefill="so <|im_end|>").ids
    )
