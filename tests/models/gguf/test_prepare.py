"""GGUF files that cannot be used as they are: weights, tokenizer and template survive the conversion."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bough.errors import ModelError, UnsupportedModel
from bough.models import ModelFiles, load_tokenizer
from bough.models.gguf.folder import MadeModel
from bough.models.gguf.prepare import convert as convert_model
from bough.models.weights.gguf_header import read_gguf
from bough.types import Progress
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.models.web_server import Recorder

Kind = gguf.GGMLQuantizationType


def convert(file: Path, folder: Path, progress: Progress) -> MadeModel:
    return convert_model(read_gguf(file), folder, progress, "for a test")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F32, torch.float32), (Kind.F16, torch.float16), (Kind.Q8_0, torch.float32), (Kind.Q4_1, torch.float32)],
)
def test_weights_are_kept_in_16_bits_or_made_float32(tmp_path, kind, dtype):
    before = write_gguf(tmp_path / "tiny.gguf", kind)

    done = convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())

    assert done.quantization == kind.name
    [file] = (tmp_path / "out").glob("*.safetensors")
    after = load_file(file)
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert done.num_parameters == sum(tensor.numel() for tensor in after.values())
    expected = gguf.dequantize(gguf.quantize(before["blk.1.ffn_up.weight"], kind), kind)
    np.testing.assert_array_equal(after["model.layers.1.mlp.up_proj.weight"].float().numpy(), expected.astype(np.float32))


def test_the_converted_folder_is_an_ordinary_model(tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    progress = Recorder()

    convert(tmp_path / "tiny.gguf", tmp_path / "out", progress)

    assert capfd.readouterr() == ("", "")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.tensor([[1, 5, 6]])).logits).all()
    assert progress.labels == ["Converting tiny.gguf, once"]
    assert progress.num_finished == 1


def test_the_tokenizer_and_its_template_survive(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.F16)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())
    chat = [{"role": "user", "content": "What is the capital of France? Grüße 🙂"}]

    tokenizer = load_tokenizer(ModelFiles("tiny", tmp_path / "out"))

    assert tokenizer.hf.chat_template == CHATML
    assert tokenizer.eos_ids == {2}
    assert (
        tokenizer.template.render(chat).ids
        == byte_level(CHATML).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    )


@pytest.mark.parametrize(("kind", "weight_bytes"), [(Kind.Q8_0, 4), (Kind.F16, 2)])
def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch, kind, weight_bytes):
    tensors = write_gguf(tmp_path / "tiny.gguf", kind)
    needed = weight_bytes * sum(tensor.size for tensor in tensors.values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed - 1))

    with pytest.raises(ModelError, match=rf"needs about {needed:,} bytes .* {needed - 1:,} bytes free"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())

    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_weight_is_told_by_name(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.F32, without="blk.1.ffn_up.weight")

    with pytest.raises(UnsupportedModel, match=r"lacks 1 of 20 weights, among them model\.layers\.1\.mlp\.up_proj"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())


def test_two_threads_that_convert_at_once_do_not_disturb_each_other(tmp_path):
    kinds = [Kind.Q8_0, Kind.Q4_0, Kind.F32, Kind.Q4_1]
    for kind in kinds:
        write_gguf(tmp_path / f"{kind.name}.gguf", kind)
        convert(tmp_path / f"{kind.name}.gguf", tmp_path / f"{kind.name}-alone", Recorder())
    original = gguf.dequantize, gguf.GGUFReader, gguf.get_tensor_name_map

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: convert(tmp_path / f"{each.name}.gguf", tmp_path / each.name, Recorder()), kinds))

    for kind in kinds:
        for name in ("model.safetensors", "packed.json"):
            assert (tmp_path / kind.name / name).read_bytes() == (tmp_path / f"{kind.name}-alone" / name).read_bytes()
    assert (gguf.dequantize, gguf.GGUFReader, gguf.get_tensor_name_map) == original


def test_the_folder_says_why_it_was_converted_and_is_no_gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())

    files = ModelFiles("tiny", tmp_path / "out")
    assert [file.name for file in files.weights] == ["model.safetensors"]
    assert not files.is_gguf
    assert files.table is not None
    assert files.table["reason"] == "for a test"
