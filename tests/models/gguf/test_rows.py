"""Which rows of a GGUF file the weights of a converted model are: unpacked from the file, they are the model's own."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bough.models.gguf.convert import convert
from bough.models.weights import PackedFile, PackedTensor, read_packed
from bough.types import SilentProgress
from tests.models.moe_gguf import EXPERT_WIDTH, NUM_EXPERTS, write_moe_gguf
from tests.models.tiny_gguf import WIDTH, write_gguf

Kind = gguf.GGMLQuantizationType
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS = (*LINEARS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def convert_to(folder: Path, file: Path) -> tuple[PackedFile, dict[str, torch.Tensor]]:
    """Convert a file; returns its table, and the weights of the model as transformers loads it."""
    convert(file, folder, SilentProgress())
    packed = read_packed(folder)
    assert packed is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return packed, dict(model.named_parameters(remove_duplicate=False))


def unpack(packed: PackedFile, tensor: PackedTensor) -> np.ndarray:
    """The values of a weight, row by row from the bytes of the file."""
    content = packed.path.read_bytes()
    starts = [run.offset + run.step_bytes * each for run in tensor.rows for each in range(run.count)]
    rows = np.array([np.frombuffer(content, np.uint8, tensor.row_bytes, start) for start in starts])
    return gguf.dequantize(rows, Kind[tensor.type]).astype(np.float32).reshape(tensor.shape)


def assert_is_model(packed: PackedFile, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in packed.tensors.items():
        np.testing.assert_array_equal(unpack(packed, tensor), weights[name].detach().float().numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("llama", Kind.F32),
        ("llama", Kind.F16),
        ("llama", Kind.BF16),
        ("llama", Kind.Q4_0),
        ("llama", Kind.Q4_1),
        ("llama", Kind.Q5_0),
        ("llama", Kind.Q5_1),
        ("qwen2", Kind.Q8_0),
        ("qwen3", Kind.Q4_0),
    ],
)
def test_every_matrix_of_a_model_is_found_in_the_file(tmp_path, architecture, kind):
    write_gguf(tmp_path / "tiny.gguf", kind, architecture=architecture)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    layers = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in LINEARS}
    assert set(packed.tensors) == {*layers, "model.embed_tokens.weight", "lm_head.weight"}
    assert {tensor.type for tensor in packed.tensors.values()} == {kind.name}
    assert_is_model(packed, weights)


def test_the_rows_of_q_and_k_of_a_llama_are_permuted_and_those_of_v_are_not(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, _ = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    q, v = (packed.tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qv")
    size = WIDTH // 32 * 34
    assert [(run.step_bytes, run.count) for run in q.rows] == [(2 * size, WIDTH // 8)] * 8  # two halves of four heads
    assert q.rows[1].offset == q.rows[0].offset + size
    assert [(run.step_bytes, run.count) for run in v.rows] == [(size, WIDTH // 2)]


def test_a_tied_head_is_found_under_both_names(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert packed.tensors["lm_head.weight"] == packed.tensors["model.embed_tokens.weight"]


def test_merged_experts_are_runs_of_two_tensors_in_turns(tmp_path):
    write_moe_gguf(tmp_path / "tiny.gguf")

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    experts = "model.layers.0.mlp.experts"
    merged, down = packed.tensors[f"{experts}.gate_up_proj"], packed.tensors[f"{experts}.down_proj"]
    assert (merged.type, down.type) == ("Q4_K", "Q8_0")
    assert [run.count for run in merged.rows] == [EXPERT_WIDTH] * 2 * NUM_EXPERTS
    assert len(down.rows) == 1
    types = {name: packed.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].type for name in "qkvo"}
    assert types == {"q": "Q4_K", "k": "Q5_K", "v": "Q6_K", "o": "BF16"}
    assert_is_model(packed, weights)


def test_experts_of_two_types_and_types_without_a_kernel_are_left_out(tmp_path):
    changed = {"blk.0.ffn_up_exps.weight": Kind.Q8_0, "blk.0.attn_output.weight": Kind.TQ2_0}
    write_moe_gguf(tmp_path / "tiny.gguf", changed)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    left_out = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.o_proj.weight"}
    assert {name for name, each in weights.items() if each.ndim > 1} - set(packed.tensors) == left_out
    assert_is_model(packed, weights)


def test_weights_that_the_conversion_rounds_are_left_out(tmp_path):
    file = tmp_path / "tiny.gguf"
    types = {"blk.0.ffn_down_exps.weight": Kind.F32}
    types |= dict.fromkeys(("token_embd.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"), Kind.F16)
    write_moe_gguf(file, types)  # F16 in the main, so that the floats get 16 bits

    packed, weights = convert_to(tmp_path / "out", file)

    assert weights["model.embed_tokens.weight"].dtype == torch.float16
    assert packed.tensors["model.layers.0.mlp.experts.gate_up_proj"].type == "F16"
    assert "model.layers.0.mlp.experts.down_proj" not in packed.tensors
    assert_is_model(packed, weights)


def test_a_library_that_cannot_read_numbers_of_rows_leaves_all_floats_and_says_so(tmp_path, monkeypatch, caplog):
    from transformers import modeling_gguf_pytorch_utils as library

    def process(self, weights, name, **_):
        return library.GGUFTensor(weights.reshape(-1, WIDTH) if weights.ndim > 1 else weights, name, {})

    monkeypatch.setattr(library.LlamaTensorProcessor, "process", process)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    with caplog.at_level(logging.WARNING):
        packed, _ = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert packed.tensors == {}
    assert "the weights of tiny.gguf stay in float32: ValueError: cannot reshape" in caplog.text


def test_a_transposed_weight_is_left_out(tmp_path, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as library

    def process(self, weights, name, **_):
        return library.GGUFTensor(weights.T if "ffn_up" in name else weights, name, {})

    monkeypatch.setattr(library.LlamaTensorProcessor, "process", process)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert "model.layers.0.mlp.up_proj.weight" not in packed.tensors
    assert "model.layers.0.mlp.gate_proj.weight" in packed.tensors
    assert_is_model(packed, weights)


def test_rows_that_the_library_changes_are_found_by_comparing(tmp_path, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as library

    def process(self, weights, name, **_):
        return library.GGUFTensor(weights + 1 if "ffn_down" in name else weights, name, {})

    monkeypatch.setattr(library.LlamaTensorProcessor, "process", process)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert "model.layers.0.mlp.down_proj.weight" not in packed.tensors  # its numbers are those of the next rows
    assert len(packed.tensors) == 2 * (len(LINEARS) - 1) + 2
    assert_is_model(packed, weights)


@pytest.mark.parametrize("order", ["backwards", "shuffled", "twice"])
def test_rows_in_any_order_are_found(tmp_path, monkeypatch, order):
    from transformers import modeling_gguf_pytorch_utils as library

    rows = np.arange(WIDTH)
    chosen = {"backwards": rows[::-1], "shuffled": np.random.default_rng(1).permutation(rows), "twice": rows // 2}[order]

    def process(self, weights, name, **_):
        return library.GGUFTensor(weights[chosen] if "ffn_down" in name else weights, name, {})

    monkeypatch.setattr(library.LlamaTensorProcessor, "process", process)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = convert_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert "model.layers.1.mlp.down_proj.weight" in packed.tensors
    assert_is_model(packed, weights)
