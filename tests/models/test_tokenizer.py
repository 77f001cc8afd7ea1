"""The tokenizer: text to ids, ids to text and exact bytes, and models without one."""

from __future__ import annotations

import json

import pytest

from bough.errors import RequestError, UnsupportedModel
from bough.models import ModelFiles, Tokenizer, load_tokenizer
from tests.models.tiny_tokenizer import byte_level, sentencepiece

TEXTS = [
    "What is the capital of France?",
    "Grüße aus Köln, 你好 🙂",
    "  two  spaces\n\n\tand a tab",
    "\u0000\x7f ~ “quoted”",
]


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_of_a_byte_level_vocabulary_join_to_the_text(text):
    tokenizer = Tokenizer(byte_level())

    for _ in range(2):  # the second time they are remembered
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_of_a_sentencepiece_vocabulary_join_to_the_text_behind_its_first_space(text):
    tokenizer = Tokenizer(sentencepiece())

    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == b" " + text.encode()


def test_token_bytes_of_special_and_of_unknown_ids():
    tokenizer = Tokenizer(byte_level())

    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(len(tokenizer.hf) + 5) == b""


def test_special_tokens_in_a_raw_prompt_are_read_as_such():
    tokenizer = Tokenizer(byte_level())

    ids = tokenizer.encode("<|im_start|>user")

    assert ids[0] == 1
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user"


def test_encoding_is_that_of_the_library_and_never_truncated():
    hf = byte_level()
    hf.backend_tokenizer.enable_truncation(4)
    tokenizer = Tokenizer(hf)

    assert tokenizer.encode(TEXTS[0]) == hf(TEXTS[0])["input_ids"]
    assert len(tokenizer.encode(TEXTS[0])) > 4


def test_ids_that_steer_are_told_apart_from_added_words():
    tokenizer = Tokenizer(byte_level())

    assert tokenizer.special_ids == {0, 1, 2}


def make_folder(tmp_path, with_tokenizer=True, **configs):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, content in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    if with_tokenizer:
        byte_level().save_pretrained(tmp_path)
    return ModelFiles("tiny", tmp_path)


def test_ends_are_gathered_from_both_configurations_and_the_tokenizer(tmp_path):
    files = make_folder(
        tmp_path,
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
        generation_config={"eos_token_id": [9, 10]},
    )

    assert load_tokenizer(files).eos_ids == {2, 7, 8, 9, 10}


def test_a_saved_tokenizer_loads_with_its_template(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path))

    assert tokenizer.template.render([{"role": "user", "content": "Hello"}]).text.endswith("<|im_start|>assistant\n")


def test_a_model_without_tokenizer_files_knows_its_ends_and_takes_no_text(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path, with_tokenizer=False, generation_config={"eos_token_id": 5}))

    assert not tokenizer.has_text
    assert tokenizer.eos_ids == {5}
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.special_ids == frozenset()
    with pytest.raises(RequestError, match="no tokenizer"):
        tokenizer.encode("Hello")
    with pytest.raises(RequestError, match="no tokenizer"):
        tokenizer.template.render([{"role": "user", "content": "Hello"}])


def test_a_broken_tokenizer_is_an_error_of_the_model(tmp_path):
    files = make_folder(tmp_path, with_tokenizer=False)
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(UnsupportedModel, match="cannot load the tokenizer"):
        load_tokenizer(files)
