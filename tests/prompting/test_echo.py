"""The prompt that an answer repeats, and prompts with a suffix, over tiny tokenizers."""

from __future__ import annotations

import pytest
from tokenizers import processors

from bough.errors import PromptTooLong, RequestError
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.prompting.echo import EchoedPrompt, make_echo
from bough.prompting.prompt import ModelFacts, prepare_request
from tests.models.tiny_tokenizer import byte_level, sentencepiece


def facts_of(tokenizer: Tokenizer, context_tokens: int = 100) -> ModelFacts:
    return ModelFacts("m", Prompts(tokenizer, 500), context_tokens)


def echo_of(tokenizer: Tokenizer, ask: Ask) -> EchoedPrompt:
    return make_echo(ask, prepare_request(ask, facts_of(tokenizer)).tokens, tokenizer)


def with_start(*, trims: bool) -> Tokenizer:
    """A tokenizer that puts a token before each prompt; `trims`: it counts spaces to no token, as GPT-2's does."""
    hf = byte_level(None)
    backend = hf.backend_tokenizer
    start = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
    template = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[start])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trims), template])
    return Tokenizer(hf)


@pytest.mark.parametrize("trims", [True, False])
def test_every_token_begins_where_its_text_does_in_the_prompt_as_it_came(trims: bool) -> None:
    text = "Hello  there € <|im_end|> é"
    echo = echo_of(with_start(trims=trims), Ask("m", text=text, echoes=True, scores_prompt=True))

    assert echo.text == text
    assert echo.tokens[0] == b"<|endoftext|>" and echo.offsets[:2] == (0, 0)
    data, characters = b"", text.encode()
    for token, offset in zip(echo.tokens[1:], echo.offsets[1:], strict=True):
        assert len(characters[: len(data)].decode(errors="ignore")) == offset  # of whole characters before
        data += token
    assert data == characters


def test_a_space_that_the_tokenizer_puts_in_front_does_not_count() -> None:
    echo = echo_of(Tokenizer(sentencepiece(None)), Ask("m", text="ab c", echoes=True, scores_prompt=True))

    assert (echo.text, echo.tokens, echo.offsets) == ("ab c", (b" ", b"a", b"b", b" ", b"c"), (0, 0, 1, 2, 3))


def test_ids_are_repeated_as_their_text() -> None:
    tokenizer = Tokenizer(byte_level(None))
    ids = tokenizer.encode("Hello €<|im_end|>")

    echo = echo_of(tokenizer, Ask("m", ids=ids, echoes=True, scores_prompt=True))

    assert echo.text == "Hello €<|im_end|>"
    assert b"".join(echo.tokens).decode() == echo.text
    assert echo.offsets[-1] == len("Hello €") and len(echo.offsets) == len(ids)


def test_a_prompt_that_is_not_scored_is_repeated_without_its_tokens() -> None:
    tokenizer = Tokenizer(byte_level(None))

    assert echo_of(tokenizer, Ask("m", text="Hello", echoes=True)) == EchoedPrompt("Hello")
    assert echo_of(tokenizer, Ask("m", ids=tokenizer.encode("Hello"), echoes=True)) == EchoedPrompt("Hello")


def test_a_suffix_goes_to_models_with_tokens_for_it() -> None:
    hf = byte_level(None)
    hf.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    model = facts_of(Tokenizer(hf))

    encoded = prepare_request(Ask("m", text="Hello", suffix="there"), model)

    assert model.prompts.decode(encoded.tokens) == "<|fim_prefix|>Hello<|fim_suffix|>there<|fim_middle|>"
    assert hf.convert_tokens_to_ids("<|fim_middle|>") in encoded.end_ids


def test_a_suffix_is_refused_by_other_models_and_where_it_is_too_long() -> None:
    with pytest.raises(RequestError, match=r"^m does not support insert$"):
        prepare_request(Ask("m", text="Hello", suffix="there"), facts_of(Tokenizer(byte_level())))
    hf = byte_level(None)
    hf.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    with pytest.raises(PromptTooLong):
        prepare_request(Ask("m", text="1 2 3", suffix="1 2 3"), facts_of(Tokenizer(hf), context_tokens=6))
