"""Prompts of the library: what each kind of them asks, and the tokens that it becomes."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from bough.errors import PromptTooLong, RequestError
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.prompting.prompt import ModelFacts, encode_ask, encode_prefix, prepare_request
from bough.prompting.user_prompt import read_prompt
from tests.models.tiny_tokenizer import CHATML, byte_level

HELLO = {"role": "user", "content": "Hello"}


def model_with(template: str | None, context_tokens: int = 1000) -> ModelFacts:
    return ModelFacts("m", Prompts(Tokenizer(byte_level(template)), 500), context_tokens)


def text_of(model: ModelFacts, prompt: Any, **options: Any) -> str:
    return model.prompts.decode(encode_ask(read_prompt(prompt, **options), model).tokens)


def test_a_text_is_a_message_where_there_is_a_template() -> None:
    model = model_with(CHATML)

    assert text_of(model, "Hello") == text_of(model, [HELLO])
    assert text_of(model, "Hello").endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(model, "Hello", raw=True) == text_of(model_with(None), "Hello") == "Hello"


@pytest.mark.parametrize("as_ids", [list, tuple, np.array, lambda ids: array("i", ids)])
def test_ids_may_come_as_any_sequence_or_array(as_ids: Any) -> None:
    assert encode_ask(read_prompt(as_ids([3, 1, 2])), model_with(None)).tokens.ids == [3, 1, 2]


@pytest.mark.parametrize("prompt", [5, None, np.float32(1.0), b"Hello", {"role": "user"}])
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a text, messages, or token ids"):
        read_prompt(prompt)


def test_a_last_message_of_the_assistant_is_gone_on_with_in_a_chat_of_the_server_alone() -> None:
    model, messages = model_with(CHATML), [HELLO, {"role": "assistant", "content": "Yes"}]
    served = encode_ask(Ask("m", messages=messages), model)

    assert text_of(model, messages).endswith("<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>assistant\n")
    assert model.prompts.decode(served.tokens).endswith("<|im_start|>assistant\nYes")


def test_a_prefix_ends_where_another_text_or_message_may_follow() -> None:
    model = model_with(CHATML)

    def prefix_of(prompt: Any) -> str:
        return model.prompts.decode(encode_prefix(read_prompt(prompt), model).tokens)

    assert prefix_of([HELLO]).endswith("<|im_start|>user\nHello<|im_end|>\n")
    assert prefix_of("Hello").endswith("<|im_start|>user\nHello")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded_to_its_end() -> None:
    with pytest.raises(PromptTooLong) as refused:
        prepare_request(read_prompt("1 2 " * 10_000, raw=True), model_with(None, context_tokens=10))
    assert refused.value.is_least
