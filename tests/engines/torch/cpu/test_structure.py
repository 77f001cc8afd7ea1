"""Which models run in one call of the kernels, and which must not; both give the logits of transformers' own modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bough.engines.torch import TorchEngine
from bough.engines.torch.cpu import structure
from bough.engines.torch.cpu.route import choose_weights
from bough.engines.torch.cpu.step import WholeStep
from tests.contract.driving import make_ids, new_lane, run
from tests.packed_models import differs_by, load_packed, make_reference, make_settings, make_wide_model, save_model

pytestmark = pytest.mark.usefixtures("kernels", "one_thread")

TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}

KNOWN: dict[str, dict[str, Any]] = {
    "llama, tied, odd sizes": {
        "tie_word_embeddings": True,
        "hidden_size": 60,
        "intermediate_size": 76,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, yarn": {"rope_parameters": YARN},
    "llama, llama3": {"rope_parameters": LLAMA3},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {"rope_parameters": PARTIAL, "sliding_window": 24},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "granite": MULTIPLIERS,
    "gemma": {"head_dim": 16},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {},
}

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "cohere2": ({"sliding_window": 24, "head_dim": 16}, "Cohere2LayerNorm is not an RMS norm"),
    "olmo2": ({}, "its norm of queries or keys covers 64 columns, and a head has 16"),
    "olmo": ({}, "OlmoLayerNorm has no epsilon"),  # nor weights: no parameter of the model is left unpacked
    "exaone4": ({"sliding_window": 24}, "no attribute 'input_layernorm'"),
    "arcee": ({}, "no attribute 'gate_proj'"),
    "qwen3_moe": (MOE, "its MLP has .*experts.*, which the kernels do not know"),
    "llama, dynamic": ({"rope_parameters": DYNAMIC}, "its rotation 'dynamic' is not one of default, linear, llama3, yarn"),
    "llama, exact gelu": (
        {"hidden_act": "gelu"},
        "its activation GELUActivation is neither SiLU nor the tanh form of GELU",
    ),
    "phi3, longrope": ({"rope_parameters": LONG}, "its rotation 'longrope' is not one of default, linear, llama3, yarn"),
    "helium": ({"head_dim": 16}, "its logits differ from those of the model's own code"),  # rotates neighbours, not halves
}


def largest_difference(engine: TorchEngine, folder: Path) -> float:
    """In one run, in pieces and token by token, beyond the windows of the tiny models."""
    reference = make_reference(folder)
    ids = make_ids(engine, 70)
    wanted = reference(ids)
    lane = new_lane(engine, 70)
    found = {size: run(engine, lane, ids, [size]) for size in (40, 1, 2, 17)}
    ends = (39, 40, 42, 59)
    return max(differs_by(logits, wanted[end]) for logits, end in zip(found.values(), ends, strict=True))


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_structure_runs_in_one_call_and_changes_no_logit(name: str, tmp_path: Path) -> None:
    folder = save_model(make_wide_model(name.partition(",")[0], **KNOWN[name]), tmp_path / "model")

    engine = load_packed(folder)

    assert engine.describe()["step"].startswith("whole, in one call"), engine.describe()["step"]
    assert engine.describe()["weights"].startswith("packed: BF16")
    assert largest_difference(engine, folder) <= TOLERANCE


@pytest.mark.parametrize("name", UNKNOWN)
def test_another_structure_is_told_and_runs_in_modules_with_packed_weights(name: str, tmp_path: Path) -> None:
    config, why = UNKNOWN[name]
    folder = save_model(make_wide_model(name.partition(",")[0], **config), tmp_path / "model")

    engine = load_packed(folder)

    step = engine.describe()["step"]
    assert step.startswith("transformers' modules, products by")
    assert re.search(why, step), step
    assert engine.describe()["weights"].startswith("packed: BF16")
    assert largest_difference(engine, folder) <= TOLERANCE


class FarScaledLlama(LlamaForCausalLM):
    """Computes as its parent does up to position 1,000, and something else beyond, where a short prompt never comes."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        far = torch.zeros(1) if position_ids is None else (position_ids[:, -output.logits.shape[1] :] > 1000).float()
        output.logits = output.logits * (1 + far[..., None] / 10)
        return output


def test_a_model_that_computes_something_else_far_from_the_start_is_found_out(tmp_path: Path) -> None:
    plain = make_wide_model("llama")
    model = FarScaledLlama(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    settings = make_settings(tmp_path / "model")

    engine = TorchEngine(model, settings, weights=choose_weights(settings, torch.device("cpu"), torch.float32))

    assert "near the end of the context" in engine.describe()["step"]
    ids = make_ids(engine, 1100)
    lane = new_lane(engine, 1100)
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        wanted = model(input_ids=torch.tensor([ids]), position_ids=torch.arange(1100)[None], use_cache=False).logits[0]
        model.set_attn_implementation(engine.describe()["attention"])
    assert differs_by(run(engine, lane, ids, [1000, 99, 1]), wanted[-1]) <= TOLERANCE


def test_a_step_that_differs_from_one_run_of_the_prompt_by_a_bit_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = WholeStep.step
    monkeypatch.setattr(WholeStep, "step", lambda *args: [torch.nextafter(each, each + 1) for each in step(*args)])
    folder = save_model(make_wide_model("llama"), tmp_path / "model")

    engine = load_packed(folder)

    assert "depend on how a prompt is split" in engine.describe()["step"]
    assert engine.capabilities.can_reuse


@pytest.mark.parametrize("misread", [False, True])
def test_the_one_layer_without_rotation_is_checked_however_late_it_comes(
    misread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = [1] * 10 + [0, 1]
    model = make_wide_model("smollm3", num_hidden_layers=12, no_rope_layers=rotated)
    folder = save_model(model, tmp_path / "model")
    if misread:
        find, rotating = structure._Rotations.find, model.model.layers[0].self_attn
        monkeypatch.setattr(structure._Rotations, "find", lambda self, attention, index: find(self, rotating, 0))

    engine = load_packed(folder)

    assert ("its logits differ" in engine.describe()["step"]) == misread, engine.describe()["step"]
    assert engine.describe()["step"].startswith("whole") != misread
    assert largest_difference(engine, folder) <= TOLERANCE


def test_a_real_family_that_scales_queries_by_their_position_is_found_out(tmp_path: Path) -> None:
    rope = YARN | {"llama_4_scaling_beta": 0.5}

    folder = save_model(make_wide_model("ministral3", head_dim=16, rope_parameters=rope), tmp_path / "model")

    assert "near the end of the context" in load_packed(folder).describe()["step"]


def test_norms_that_add_one_to_their_weights_and_norms_that_do_not_are_told_apart(tmp_path: Path) -> None:
    """Weights of one half: 0.5 for Llama, 1.5 for Gemma. Large enough that a mistake would be heard."""
    for name in ("llama", "gemma"):
        model = make_wide_model(name, head_dim=16)
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.data.fill_(0.5)
        folder = save_model(model, tmp_path / name)
        engine = load_packed(folder)

        assert engine.describe()["step"].startswith("whole")
        assert largest_difference(engine, folder) <= TOLERANCE
