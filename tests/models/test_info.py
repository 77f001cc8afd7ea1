"""What can be told of a model without loading it."""

from __future__ import annotations

import hashlib

import pytest

from bough.config import Settings
from bough.errors import UnsupportedModel
from bough.models import ModelFiles, describe
from bough.models.sources import resolve
from tests.models.packed_model import write_packed_model
from tests.models.tiny_gguf import FOR_TORCH
from tests.models.tiny_tokenizer import THINKS, byte_level
from tests.tiny_encoders import make_encoder, make_reranker, pooling, write_json, write_modules
from tests.tiny_models import make_folder, make_model


def test_a_folder_with_a_tokenizer_is_described(tmp_path):
    folder = make_folder("qwen3", tmp_path / "tiny")
    byte_level(THINKS).save_pretrained(folder)

    info = describe(resolve(folder, Settings(data_folder=tmp_path), FOR_TORCH))

    assert info.name == "tiny"
    assert info.architecture == "Qwen3ForCausalLM"
    assert info.num_parameters == sum(each.numel() for each in make_model("qwen3").parameters())
    assert info.context_tokens == 2048
    assert info.dtype == "float32"
    assert info.digest == "sha256:" + hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert info.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert info.has_chat_template
    assert info.capabilities == ("completion", "chat", "tools", "thinking")


def test_a_folder_without_a_tokenizer_completes_only(tmp_path):
    info = describe(ModelFiles("bare", make_folder("mamba", tmp_path / "bare")))

    assert not info.has_tokenizer
    assert not info.has_chat_template
    assert info.capabilities == ("completion",)


def test_a_folder_with_a_pickle_alone_is_refused(tmp_path):
    folder = make_folder("llama", tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(UnsupportedModel, match="no safetensors weights in"):
        describe(ModelFiles("pickled", folder))


@pytest.mark.parametrize("header", ["[]", "{", '{"a": {}}', '{"a": []}', '{"a": {"shape": 3}}', '{"a": {"shape": ["3"]}}'])
def test_weights_with_a_broken_header_are_refused(tmp_path, header):
    folder = make_folder("llama", tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())

    with pytest.raises(UnsupportedModel, match="not a safetensors file"):
        describe(ModelFiles("broken", folder))


def test_weights_that_mlx_packed_count_as_what_they_stand_for(tmp_path):
    write_packed_model(tmp_path / "packed")

    info = describe(ModelFiles("packed", tmp_path / "packed"))

    assert info.num_parameters == 64 * 128 + 32 * 64 + 32 + 128
    assert info.quantization == "4-bit"


def test_a_vocabulary_with_tokens_for_infill_can_insert(tmp_path):
    folder = make_folder("qwen3", tmp_path / "coder")
    tokenizer = byte_level(None)
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    tokenizer.save_pretrained(folder)

    info = describe(resolve(folder, Settings(data_folder=tmp_path), FOR_TORCH))

    assert info.capabilities == ("completion", "insert")


def test_an_encoder_makes_embeddings_of_texts_as_long_as_its_files_allow(tmp_path):
    folder = write_modules(make_encoder(tmp_path / "embeds"), pooling())
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 48})

    info = describe(ModelFiles("embeds", folder))

    assert info.capabilities == ("embedding",)
    assert info.context_tokens == 48
    assert info.has_tokenizer


def test_a_classifier_of_pairs_can_rerank(tmp_path):
    info = describe(ModelFiles("ranks", make_reranker(tmp_path / "ranks")))

    assert info.capabilities == ("rerank",)
    assert info.context_tokens == 64
