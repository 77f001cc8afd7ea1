"""GGUF files that are kept as they are: the folder around them says what transformers would say of the file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from bough.errors import UnsupportedModel
from bough.models import ModelFiles, describe, load_tokenizer
from bough.models.gguf.folder import ARCHITECTURES, MadeModel
from bough.models.gguf.folder import make_folder as make_model_folder
from bough.models.gguf.prepare import convert as convert_model
from bough.models.weights.gguf_header import read_gguf
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.models.web_server import Recorder

Kind = gguf.GGMLQuantizationType


def make_folder(file: Path, folder: Path, progress: Recorder) -> MadeModel:
    return make_model_folder(read_gguf(file), folder, progress)


def convert(file: Path, folder: Path, progress: Recorder) -> MadeModel:
    return convert_model(read_gguf(file), folder, progress, "for a test")


SAME_IN_BOTH = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


def write_header(file, architecture="llama", kind=Kind.F32, **values) -> None:
    """A file with one weight, and values that are unusual."""
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in values.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((4, 256 // block * size), np.uint8) if kind != Kind.F32 else np.zeros((4, 256), np.float32)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_configuration_says_what_the_converted_folders_says(tmp_path, architecture):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0, architecture=architecture)

    kept = make_folder(tmp_path / "tiny.gguf", tmp_path / "kept", Recorder())
    converted = convert(tmp_path / "tiny.gguf", tmp_path / "converted", Recorder())

    found, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("kept", "converted"))
    assert {name: found[name] for name in SAME_IN_BOTH} == {name: expected[name] for name in SAME_IN_BOTH}
    assert kept == converted


def test_the_tokenizer_and_its_template_are_those_of_the_converted_folder(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    make_folder(tmp_path / "tiny.gguf", tmp_path / "kept", Recorder())
    convert(tmp_path / "tiny.gguf", tmp_path / "converted", Recorder())
    chat = [{"role": "user", "content": "What is the capital of France? Grüße 🙂"}]

    kept, converted = (load_tokenizer(ModelFiles("tiny", tmp_path / name)) for name in ("kept", "converted"))

    assert kept.hf.chat_template == CHATML
    assert kept.eos_ids == converted.eos_ids == {2}
    assert kept.template.render(chat) == converted.template.render(chat)
    assert (tmp_path / "kept" / "tokenizer.json").read_text() == (tmp_path / "converted" / "tokenizer.json").read_text()


@pytest.mark.parametrize("write", [make_folder, convert])
@pytest.mark.parametrize(
    ("said", "has_start"),
    [
        ({}, False),
        ({"adds_start": True}, True),
        ({"split": "llama-bpe"}, True),
        ({"split": "llama-bpe", "adds_start": False}, False),
        ({"split": "qwen2"}, False),
    ],
)
def test_a_raw_prompt_begins_as_the_file_says_and_a_chat_as_its_template_does(tmp_path, write, said, has_start):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0, **said)
    write(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())

    tokenizer = load_tokenizer(ModelFiles("tiny", tmp_path / "out"))

    assert (tokenizer.encode("Hello") == [1, *tokenizer.hf.encode("Hello", add_special_tokens=False)]) == has_start
    assert (tokenizer.encode("Hello") == tokenizer.hf.encode("Hello", add_special_tokens=False)) != has_start
    chat = [{"role": "user", "content": "Hello"}]
    assert (
        tokenizer.template.render(chat).ids
        == byte_level(CHATML).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    )


def test_the_folder_shares_the_file_and_is_described_by_it(tmp_path, capfd):
    tensors = write_gguf(tmp_path / "tiny.gguf", Kind.Q4_1)
    progress = Recorder()

    make_folder(tmp_path / "tiny.gguf", tmp_path / "kept", progress)

    files = ModelFiles("tiny", tmp_path / "kept")
    info = describe(files)
    assert files.is_gguf
    assert files.weights == [tmp_path / "kept" / "model.gguf"]
    assert files.weights[0].samefile(tmp_path / "tiny.gguf")
    assert info.num_parameters == sum(each.size for each in tensors.values())
    assert info.size_bytes > (tmp_path / "tiny.gguf").stat().st_size
    assert progress.labels == ["Reading tiny.gguf, once"]
    assert progress.num_finished == 1
    assert capfd.readouterr() == ("", "")


def test_an_architecture_that_no_engine_reads_is_told_with_what_to_install(tmp_path):
    write_header(tmp_path / "other.gguf", "falcon")

    with pytest.raises(UnsupportedModel, match=r"architecture 'falcon'.*pip install 'bough-llm\[torch\]'"):
        make_folder(tmp_path / "other.gguf", tmp_path / "kept", Recorder())

    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("kind", [Kind.Q5_K, Kind.Q3_K, Kind.IQ4_NL, Kind.MXFP4])
def test_a_type_of_weights_that_mlx_cannot_read_is_told(tmp_path, kind):
    write_header(tmp_path / "other.gguf", kind=kind)

    with pytest.raises(UnsupportedModel, match=f"holds weights as {kind.name}; without torch F32, "):
        make_folder(tmp_path / "other.gguf", tmp_path / "kept", Recorder())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention__sliding_window": 128}, r"attention\.sliding_window"),
        ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type"),
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path, values, name):
    write_header(tmp_path / "other.gguf", **values)

    with pytest.raises(UnsupportedModel, match=f"has {name}"):
        make_folder(tmp_path / "other.gguf", tmp_path / "kept", Recorder())


def test_a_value_that_is_missing_is_named(tmp_path):
    write_header(tmp_path / "other.gguf")

    with pytest.raises(UnsupportedModel, match=r"other\.gguf does not say its attention\.head_count"):
        make_folder(tmp_path / "other.gguf", tmp_path / "kept", Recorder())
