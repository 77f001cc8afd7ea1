"""Which rows of a GGUF file the weights of a model are: unpacked from the file, they are what transformers makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bough.models.gguf import reading, row_table
from bough.models.gguf.reading import RowsNotFound
from bough.models.weights.packed import PackedFile
from tests.models.gguf.prepared import assert_is_model, load_by_library, prepare_to
from tests.models.moe_gguf import EXPERT_WIDTH, NUM_EXPERTS, write_moe_gguf
from tests.models.tiny_gguf import WIDTH, write_gguf

Kind = gguf.GGMLQuantizationType
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS = (*LINEARS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def prepare_and_load(folder: Path, file: Path) -> tuple[PackedFile, dict[str, torch.Tensor]]:
    """Prepare a file; returns its table, and the weights of the model as transformers reads them."""
    return prepare_to(folder, file), load_by_library(file)


def change_rows(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, str], Any]) -> None:
    """Let the library change the weights of a llama in another way than it does."""
    from transformers import modeling_gguf_pytorch_utils as library

    def process(self, weights, name, **_):
        return library.GGUFTensor(change(weights, name), name, {})

    monkeypatch.setattr(library.LlamaTensorProcessor, "process", process)


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

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    layers = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in LINEARS}
    assert set(packed.tensors) == {*layers, "model.embed_tokens.weight", "lm_head.weight"}
    assert {tensor.type for tensor in packed.tensors.values()} == {kind.name}
    assert_is_model(packed, weights)


def test_the_rows_of_q_and_k_of_a_llama_are_permuted_and_those_of_v_are_not(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, _ = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    q, v = (packed.tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qv")
    size = WIDTH // 32 * 34
    assert [(run.step_bytes, run.count) for run in q.rows] == [(2 * size, WIDTH // 8)] * 8  # two halves of four heads
    assert q.rows[1].offset == q.rows[0].offset + size
    assert [(run.step_bytes, run.count) for run in v.rows] == [(size, WIDTH // 2)]


def test_a_tied_head_is_found_under_both_names(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert packed.tensors["lm_head.weight"] == packed.tensors["model.embed_tokens.weight"]


def test_merged_experts_are_runs_of_two_tensors_in_turns(tmp_path):
    write_moe_gguf(tmp_path / "tiny.gguf")

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    experts = "model.layers.0.mlp.experts"
    merged, down = packed.tensors[f"{experts}.gate_up_proj"], packed.tensors[f"{experts}.down_proj"]
    assert (merged.type, down.type) == ("Q4_K", "Q8_0")
    assert [run.count for run in merged.rows] == [EXPERT_WIDTH] * 2 * NUM_EXPERTS
    assert len(down.rows) == 1
    types = {name: packed.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].type for name in "qkvo"}
    assert types == {"q": "Q4_K", "k": "Q5_K", "v": "Q6_K", "o": "BF16"}
    assert_is_model(packed, weights)


def test_a_type_without_a_kernel_is_found_too(tmp_path):
    write_moe_gguf(tmp_path / "tiny.gguf", {"blk.0.attn_output.weight": Kind.TQ2_0})

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    assert packed.tensors["model.layers.0.self_attn.o_proj.weight"].type == "TQ2_0"
    assert_is_model(packed, weights)


def test_large_experts_of_two_types_are_no_rows_of_the_file(tmp_path):
    write_moe_gguf(tmp_path / "tiny.gguf", {"blk.0.ffn_up_exps.weight": Kind.Q8_0})

    with pytest.raises(RowsNotFound, match=r"1 of \d+ weights are not rows of the file, such as .*experts\.gate_up_proj"):
        prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    assert not (tmp_path / "out").exists()


def test_a_library_that_cannot_read_marks_of_rows_is_an_error_with_its_reason(tmp_path, monkeypatch):
    change_rows(monkeypatch, lambda weights, name: weights.reshape(-1, WIDTH) if weights.ndim > 1 else weights)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    with pytest.raises(RowsNotFound, match="ValueError: cannot reshape"):
        prepare_to(tmp_path / "out", tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "change", [lambda rows: rows.T, lambda rows: rows + 1, lambda rows: rows * 2, lambda rows: -rows, lambda rows: rows / 2]
)
def test_a_small_weight_that_the_library_changes_is_kept_as_floats(tmp_path, monkeypatch, change):
    change_rows(monkeypatch, lambda weights, name: change(weights) if "ffn_up" in name else weights)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    changed = "model.layers.0.mlp.up_proj.weight"
    assert changed not in packed.tensors
    assert len(packed.tensors) == 2 * (len(LINEARS) - 1) + 2
    assert_is_model(packed, weights)
    assert torch.equal(load_file(tmp_path / "out" / "floats.safetensors")[changed], weights[changed])


def test_norms_and_biases_are_floats_as_the_library_makes_them(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0, architecture="qwen2")

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    floats = load_file(tmp_path / "out" / "floats.safetensors")
    assert set(floats) == set(weights) - set(packed.tensors)
    assert all(torch.equal(each, weights[name]) for name, each in floats.items())
    assert {each.dtype for each in floats.values()} == {torch.float32}


def test_no_large_weight_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.quants, "dequantize", None)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    unpacked = []
    unpack = reading.unpack_tensor
    monkeypatch.setattr(
        row_table, "unpack_tensor", lambda model, each: unpacked.append(len(each.shape)) or unpack(model, each)
    )

    prepare_to(tmp_path / "out", tmp_path / "tiny.gguf")

    assert set(unpacked) == {1}
    assert sum(each.stat().st_size for each in (tmp_path / "out").glob("*.safetensors")) < 20_000


def test_a_missing_weight_is_told_by_name(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", Kind.F32, without="blk.1.ffn_up.weight")

    with pytest.raises(RowsNotFound, match=r"1 of 21 weights .* such as model\.layers\.1\.mlp\.up_proj"):
        prepare_to(tmp_path / "out", tmp_path / "tiny.gguf")


@pytest.mark.parametrize("order", ["backwards", "shuffled", "twice"])
def test_rows_in_any_order_are_found(tmp_path, monkeypatch, order):
    rows = np.arange(WIDTH)
    chosen = {"backwards": rows[::-1], "shuffled": np.random.default_rng(1).permutation(rows), "twice": rows // 2}[order]

    change_rows(monkeypatch, lambda weights, name: weights[chosen] if "ffn_down" in name else weights)
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    packed, weights = prepare_and_load(tmp_path / "out", tmp_path / "tiny.gguf")

    assert "model.layers.1.mlp.down_proj.weight" in packed.tensors
    assert_is_model(packed, weights)
