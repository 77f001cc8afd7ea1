"""How weights are kept on a CPU and what computes, and the reasons why it is not something faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.engines.torch.cpu import route
from bough.engines.torch.cpu.library import Kernels
from bough.engines.torch.cpu.route import choose_weights
from bough.engines.torch.cpu.structure import UnknownStructure, read_structure
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.model_loader import load_model
from bough.engines.torch.self_check.probe import probe
from bough.errors import KernelsMissing, ModelError, SettingsError
from tests.tiny_models import CONFIGS, make_folder

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Kernels:
        raise KernelsMissing("there was no C compiler", "install gcc")

    monkeypatch.setattr(route, "load_kernels", fail)


def make_engine(tmp_path: Path, name: str = "llama", **options: Any) -> TorchEngine:
    settings = Settings(device="cpu", cache_folder=tmp_path / "cache", **options)
    loaded = load_model(make_folder(name, tmp_path / name), settings)
    return TorchEngine(loaded.model, settings, weights=loaded.weights)


@pytest.mark.parametrize(
    ("settings", "weights", "step"),
    [
        ({}, "float32 (as in its files)", "whole, in one call ({title} kernels)"),
        ({"weights": "q8_0"}, "quantized: Q8_0 (0 MB)", "whole, in one call ({title} kernels)"),
        ({"weights": "float32"}, "float32 (the setting weights is float32)", "transformers' modules in torch"),
        (
            {"name": "gpt_oss", "weights": "q8_0"},
            "quantized: Q8_0 (0 MB)",
            "transformers' modules, products by {title} kernels; not in one call, because its attention has sinks, "
            "which the kernels do not know",
        ),
        (
            {"dtype": "bfloat16"},
            "bfloat16 (packed weights need float32, and dtype is bfloat16)",
            "transformers' modules in torch",
        ),
    ],
)
def test_the_engine_tells_how_weights_are_kept_and_what_computes(tmp_path, kernels, settings, weights, step):
    found = make_engine(tmp_path, **settings).describe()

    assert (found["weights"], found["step"]) == (weights, step.format(title=kernels.title))


def test_without_kernels_the_model_runs_in_float32_and_says_why(tmp_path, without_kernels):
    found = make_engine(tmp_path).describe()

    assert found["weights"] == "float32 (there are no kernels for this CPU: there was no C compiler)"
    assert found["step"] == "transformers' modules in torch"


def test_damaged_weights_of_a_norm_are_an_error_in_words(tmp_path, kernels):
    settings = Settings(device="cpu", cache_folder=tmp_path / "cache")
    make_engine(tmp_path)  # whose verdict is kept
    loaded = load_model(tmp_path / "llama", settings)
    with torch.inference_mode():
        loaded.model.model.layers[1].input_layernorm.weight[3] = torch.nan

    with pytest.raises(ModelError, match=r"damaged.* a LlamaRMSNorm has weights that are not finite numbers"):
        TorchEngine(loaded.model, settings, weights=loaded.weights)


def test_a_model_of_another_structure_names_the_part(tmp_path, kernels):
    step = make_engine(tmp_path, "gpt_oss").describe()["step"]

    assert step == (
        "transformers' modules, products in torch; not in one call, because its attention has sinks, "
        "which the kernels do not know"
    )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3_next", CONFIGS["qwen3_next"], "it has recurrent layers"),
        ("gpt2", {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128}, "it has no decoder named `model`"),
        ("gemma3n_text", CONFIGS["gemma3n_text"], "per_layer_projection_norm and 2 more, which the kernels do not know"),
        ("qwen3_moe", EXPERTS, "its MLP has experts, gate, which the kernels do not know"),
        ("arcee", {}, "not those of a Llama-like model ('ArceeMLP' object has no attribute 'gate_proj')"),
        ("stablelm", {}, "LayerNorm is not an RMS norm with one weight for each column"),
        ("cohere", {}, "CohereLayerNorm is not an RMS norm"),
        ("olmo2", {}, "its norm of queries or keys covers 32 columns, and a head has 16"),
        ("llama", {"hidden_act": "relu"}, "its activation ReLU is neither SiLU nor the tanh form of GELU"),
        ("llama", DYNAMIC, "its rotation 'dynamic' is not one of default, linear, llama3, yarn"),
        ("deepseek_v3", LATENT, "its keys have 16 and its values 8 columns, in float32"),
    ],
)
def test_each_reason_against_the_whole_step_is_in_plain_words(name, changes, reason):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SMALL | changes))).eval()

    with pytest.raises(UnknownStructure) as caught:
        read_structure(model, probe(TorchForward(model)))

    assert reason in str(caught.value)


def test_on_a_gpu_there_is_nothing_to_explain():
    assert choose_weights(Settings(), torch.device("cuda"), torch.bfloat16).why_not == ""


@pytest.mark.parametrize("weights", ["packed", "q8_0", "q4_0"])
def test_what_needs_the_cpu_in_float32_is_refused_elsewhere(weights):
    with pytest.raises(SettingsError, match=f"weights is '{weights}', which needs the CPU and float32: this is cuda in"):
        choose_weights(Settings(weights=weights), torch.device("cuda"), torch.bfloat16)


def test_packed_weights_without_kernels_are_refused(without_kernels):
    with pytest.raises(
        KernelsMissing,
        match=r"^weights is 'packed', and there are no kernels for this CPU: there was no C compiler; install gcc$",
    ):
        choose_weights(Settings(weights="packed"), CPU, torch.float32)


def test_packed_weights_that_the_files_do_not_have_are_refused(tmp_path, kernels):
    with pytest.raises(SettingsError, match="weights is 'packed', and no weight in the model's files is packed"):
        make_engine(tmp_path, weights="packed")
