"""Tokens of texts and pairs, compared with what transformers' own tokenizer gives."""

from __future__ import annotations

from itertools import product

import pytest
from tokenizers import processors

from bough.errors import PromptTooLong, RequestError
from bough.models.encoders.files import TokenizerOptions
from bough.models.encoders.tokenizer import EncoderTokenizer
from bough.models.tokenizer import Tokenizer
from tests.tiny_encoders import VOCABULARY, make_tokenizer

TEXTS = ["", "the cat", "Hello, the dog", "the cat " * 20, "a [SEP] b", "ü 🙂"]


def make(max_tokens: int | None = None, context: int = 64, side: str = "right", **options) -> EncoderTokenizer:
    hf = make_tokenizer(truncation_side=side)
    return EncoderTokenizer(Tokenizer(hf), TokenizerOptions(max_tokens, **options), context, len(VOCABULARY))


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_cut_as_transformers_cuts_them(side):
    tokenizer = make(9, side=side)

    found = [tokenizer.encode(text, truncate=True) for text in TEXTS]

    assert found == make_tokenizer(truncation_side=side)(TEXTS, truncation=True, max_length=9)["input_ids"]


@pytest.mark.parametrize("most", [6, 9, 64])
def test_pairs_are_cut_as_transformers_cuts_them(most):
    pairs = list(product(TEXTS, TEXTS))
    queries, documents = zip(*pairs, strict=True)
    expected = make_tokenizer()(list(queries), list(documents), truncation="longest_first", max_length=most)
    tokenizer = make(most)

    found = [tokenizer.encode_pair(*pair, truncate=True) for pair in pairs]

    assert [each.ids for each in found] == expected["input_ids"]
    assert [each.type_ids for each in found] == expected["token_type_ids"]


def test_what_is_too_long_and_may_not_be_cut_is_refused_with_the_numbers():
    tokenizer = make(6)

    with pytest.raises(PromptTooLong, match="the prompt has 8 tokens, and the context holds 6"):
        tokenizer.encode("the cat the cat the cat", truncate=False)
    with pytest.raises(PromptTooLong, match="the prompt has 9 tokens"):
        tokenizer.encode_pair("the cat", "the dog the cat", truncate=False)
    assert len(tokenizer.encode("the cat the cat", truncate=False)) == 6


def test_the_limit_is_the_least_of_the_files_the_tokenizer_and_the_model():
    own = EncoderTokenizer(Tokenizer(make_tokenizer(model_max_length=20)), TokenizerOptions(), 64, 10)
    unlimited = EncoderTokenizer(Tokenizer(make_tokenizer()), TokenizerOptions(), 64, 10)

    assert (own.max_tokens, unlimited.max_tokens, make(500).max_tokens, make(10).max_tokens) == (20, 64, 64, 10)


def test_a_text_is_lowercased_and_special_tokens_in_it_stay():
    assert make(lowercases=True).encode("The CAT [MASK]", truncate=True) == [2, VOCABULARY["the"], VOCABULARY["cat"], 4, 3]


def test_the_prompt_goes_before_the_text_and_is_counted():
    tokenizer = make(prompt="the: ")
    plain = make().encode("the: cat", truncate=True)

    ids = tokenizer.encode("cat", truncate=True)

    assert ids == plain
    assert tokenizer.count_prompt(ids) == 3  # [CLS] the :
    assert tokenizer.count_prompt(make().encode("dog", truncate=True)) == 0


def test_ids_are_checked_and_cut_before_a_closing_special_token():
    tokenizer = make(4)

    assert tokenizer.check_ids([2, 7, 8, 9, 10, 3], truncate=True) == [2, 7, 8, 3]
    assert tokenizer.check_ids([7, 8, 9, 10, 11], truncate=True) == [7, 8, 9, 10]
    with pytest.raises(PromptTooLong, match="5 tokens"):
        tokenizer.check_ids([7] * 5, truncate=False)
    with pytest.raises(RequestError, match=f"token id {len(VOCABULARY)} is outside the vocabulary of {len(VOCABULARY)}"):
        tokenizer.check_ids([len(VOCABULARY)], truncate=True)
    with pytest.raises(RequestError, match="0 tokens"):
        tokenizer.check_ids([], truncate=True)


@pytest.mark.parametrize("text", [5, None, b"bytes", "\ud800"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(RequestError, match="must be valid Unicode text"):
        make().encode_pair(text, "a", truncate=True)


def test_a_text_without_any_token_is_refused():
    hf = make_tokenizer()
    hf.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer = EncoderTokenizer(Tokenizer(hf), TokenizerOptions(), 64, len(VOCABULARY))

    assert tokenizer.encode("the cat", truncate=True)
    with pytest.raises(RequestError, match="the text has 0 tokens"):
        tokenizer.encode(" ", truncate=True)
