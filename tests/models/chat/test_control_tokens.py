"""Control tokens in unusual vocabularies: whole words, and normalizers that make markers out of other characters."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from bough.errors import RequestError
from bough.models.chat.control_tokens import ControlTokens
from bough.models.encoder import Encoder


def whole_words(*extra: str) -> Tokenizer:
    """A vocabulary of words, in which the marker is a word like any other."""
    words = {word: index for index, word in enumerate(["<unk>", "<end>", "hello", *extra])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<end>"])
    return backend


def encode(control: ControlTokens, text: str) -> list[int]:
    marked = control.mark([{"role": "user", "content": text}], None)
    assert marked is not None
    return control.encode(marked.messages[0]["content"], marked.marks).ids


def test_a_marker_that_is_a_word_is_spelt():
    backend = whole_words("<", "e", "n", "d", ">")

    assert encode(ControlTokens(backend, "", Encoder(backend)), "hello <end> hello") == [2, 3, 4, 5, 6, 7, 2]


def test_a_marker_that_cannot_be_spelt_is_refused():
    backend = Tokenizer(models.WordLevel({"#": 0, "hello": 1}, unk_token="#"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["#"])

    with pytest.raises(RequestError, match="cannot be sent as plain text"):
        encode(ControlTokens(backend, "", Encoder(backend)), "hello #")


def test_characters_that_are_normalized_to_a_marker_stay_text():
    backend = whole_words("<", "e", "n", "d", ">")
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    assert 1 in backend.encode("＜end＞").ids  # the danger is real

    assert 1 not in encode(ControlTokens(backend, "", Encoder(backend)), "＜end＞")


def test_a_chat_without_markers_is_left_alone():
    assert (
        ControlTokens(whole_words(), "", Encoder(whole_words())).mark(
            [{"role": "user", "content": "hello end"}], [{"name": "f"}]
        )
        is None
    )
