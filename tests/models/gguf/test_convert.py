"""GGUF files: weights, tokenizer and template survive the conversion, and broken files are told as such."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bough.errors import ModelError, UnsupportedModel
from bough.models import ModelFiles, load_tokenizer
from bough.models.gguf.convert import convert
from bough.models.info import count_parameters
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.models.web_server import Recorder

Kind = gguf.GGMLQuantizationType


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
    assert 0 < progress.done[0] <= progress.totals[0]
    assert progress.num_finished == 1


def test_the_tokenizer_and_its_template_survive(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.F16)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())
    chat = [{"role": "user", "content": "What is the capital of France? Grüße 🙂"}]

    tokenizer = load_tokenizer(ModelFiles("tiny", tmp_path / "out"))

    assert tokenizer.hf.chat_template == CHATML
    assert tokenizer.eos_ids == {2}
    assert (
        tokenizer.render(chat).ids == byte_level(CHATML).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
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


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not at all" * 100])
def test_a_file_that_is_no_gguf_is_told_as_such(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    progress = Recorder()

    with pytest.raises(UnsupportedModel, match=r"cannot convert bad\.gguf"):
        convert(tmp_path / "bad.gguf", tmp_path / "out", progress)

    assert progress.num_finished == len(progress.labels)


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


def test_the_file_itself_is_kept_without_a_second_copy(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    convert(tmp_path / "tiny.gguf", tmp_path / "out", Recorder())

    assert (tmp_path / "out" / "model.gguf").samefile(tmp_path / "tiny.gguf")
    assert [file.name for file in ModelFiles("tiny", tmp_path / "out").weights] == ["model.safetensors"]
    assert count_parameters(ModelFiles("tiny", tmp_path / "out")) == sum(
        tensor.numel() for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    )
