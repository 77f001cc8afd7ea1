"""Configurations in the words of mlx-lm: said right, refused, or with a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.mlx.loading.config import translate
from bough.engines.mlx.loading.model import MlxModel, load_model
from bough.errors import UnsupportedModel

IDS = [(7 * i * i + 3 * i + 5) % 90 + 4 for i in range(90)]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
}
WINDOW = {"sliding_window": 24, "head_dim": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "phi, a part of whose heads is rotated": ("phi", {"num_key_value_heads": 4}),
    "gpt_neox, with other names": ("gpt_neox", {"intermediate_size": 256}),
    "apertus, with defaults that are not written": ("apertus", {}),
    "qwen3_moe, with another name for its experts": ("qwen3_moe", EXPERTS),
    "glm4_moe, without a head_dim": ("glm4_moe", EXPERTS),
    "cohere2, with a window in three of four layers": ("cohere2", WINDOW),
    "exaone4, with a pattern in letters": ("exaone4", WINDOW),
    "olmo3, with layer types": ("olmo3", WINDOW),
    "gemma3_text without windows": ("gemma3_text", WINDOW | {"layer_types": ["full_attention"] * 4}),
    "gemma3_text, scaled in its full layers": (
        "gemma3_text",
        WINDOW
        | {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "llama, scaled as llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "llama, scaled evenly": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}}),
    "qwen2, scaled by yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e5,
                "original_max_position_embeddings": 512,
            }
        },
    ),
}
DIFFERENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "glm": ("glm", {}, "rotates all of a head of glm, and not 0.5 of it"),
    "ernie4_5_moe": ("ernie4_5_moe", EXPERTS, "without their correction"),
    "a window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
        "runs qwen2 without its window of 24 tokens",
    ),
    "a window in all layers": ("ministral3", WINDOW, "runs ministral3 without its window of 24 tokens"),
}


def save(kind: str, changes: dict[str, Any], folder: Path) -> np.ndarray:
    """Saves a random model as transformers does; returns its logits. No weight is left at its first value of 0 or 1."""
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **(SHAPE | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        return model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def difference(loaded: MlxModel, expected: np.ndarray) -> float:
    found = np.array(loaded.model(mx.array([IDS]))[0])
    return float(abs(found - expected).max() / max(1.0, np.ptp(expected)))


@pytest.mark.parametrize(("kind", "changes"), SAME.values(), ids=SAME)
def test_what_transformers_saves_is_read_as_it_was_meant(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    expected = save(kind, changes, tmp_path)

    loaded = load_model(tmp_path, Settings(device="cpu"))

    assert difference(loaded, expected) <= 1e-4
    assert loaded.warnings == ()


@pytest.mark.parametrize(("kind", "changes", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_mlx_lm_would_not_take_is_said(kind: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    expected = save(kind, changes, tmp_path)

    loaded = load_model(tmp_path, Settings(device="cpu"))

    assert difference(loaded, expected) > 1e-3
    [warning] = loaded.warnings
    assert words in warning


def test_rotary_factors_for_long_texts_are_told_to_be_used_always(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    expected = save("phi3", changes, tmp_path)

    loaded = load_model(tmp_path, Settings(device="cpu"))

    assert difference(loaded, expected) <= 1e-4  # of more than 64 tokens
    assert loaded.warnings == ("mlx-lm uses the rotary factors for long texts always: up to 64 tokens its answers differ",)


@pytest.mark.parametrize(
    "types",
    [
        ["sliding_attention"] * 4,
        ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    ],
)
def test_layers_that_do_not_take_turns_are_refused_where_mlx_lm_wants_turns(types: list[str]) -> None:
    with pytest.raises(UnsupportedModel, match=f"of these 4 layers, {types.count('full_attention')} have it"):
        translate({"model_type": "gemma3_text", "layer_types": types})


def test_linear_and_full_attention_may_take_turns_of_any_length() -> None:
    types = ["linear_attention", "linear_attention", "full_attention"] * 2

    assert translate(SHAPE | {"model_type": "qwen3_next", "layer_types": types}).config["full_attention_interval"] == 3


@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_a_rotary_scaling_that_mlx_lm_would_leave_out_is_refused(kind: str) -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}

    with pytest.raises(UnsupportedModel, match=f"runs {kind} without the yarn rotary scaling"):
        translate(SHAPE | {"model_type": kind, "rope_parameters": scaled})


def test_a_window_that_nobody_can_reach_or_that_is_turned_off_is_none() -> None:
    wide = {"model_type": "qwen2", "sliding_window": 4096, "max_position_embeddings": 4096}
    off = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False, "max_position_embeddings": 4096}

    assert translate(wide).warnings == translate(off).warnings == ()


def test_the_language_model_inside_another_is_translated_too() -> None:
    text = {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}

    said = translate({"model_type": "gemma3", "text_config": text})

    assert said.config["text_config"]["sliding_window_pattern"] == 2


def test_a_configuration_in_mlx_lms_words_stays_as_it_is() -> None:
    config = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}

    assert translate(config).config == config


def test_what_was_given_is_not_changed() -> None:
    config = {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}}
    before = json.dumps(config)

    translate(config)

    assert json.dumps(config) == before
