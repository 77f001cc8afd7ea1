"""Scaled rotations of GGUF files: read as llama.cpp writes them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bough.errors import UnsupportedModel
from bough.models.gguf.prepare import convert
from bough.models.gguf.rotation import add_scaling
from bough.models.weights.gguf_header import read_gguf
from tests.models.tiny_gguf import write_gguf
from tests.models.web_server import Recorder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequencies(rotation: dict[str, Any]) -> torch.Tensor:
    """The frequencies of a head of 16 numbers, by transformers."""
    config = AutoConfig.for_model("llama", head_dim=16, max_position_embeddings=2**17, rope_parameters=rotation)
    found, _ = ROPE_INIT_FUNCTIONS[rotation["rope_type"]](config, torch.device("cpu"))
    return found


def write_with_divisors(file: Path, divisors: list[float]) -> Path:
    write_gguf(file, gguf.GGMLQuantizationType.F32, rotary_factors=divisors)
    return file


def test_the_divisors_of_llama_3_become_its_rotation(tmp_path: Path) -> None:
    plain = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = (plain / frequencies(LLAMA3)).tolist()
    assert min(divisors) < 1.01 and any(1.01 < each < 31 for each in divisors) and max(divisors) > 31  # all three kinds
    file = write_with_divisors(tmp_path / "tiny.gguf", divisors)

    convert(read_gguf(file), tmp_path / "out", Recorder(), "for a test")

    found = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert found["rope_type"] == "llama3" and found["factor"] == pytest.approx(32)
    assert torch.allclose(frequencies(found), frequencies(LLAMA3), rtol=1e-4)


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    file = write_with_divisors(tmp_path / "tiny.gguf", [1.0] * 8)

    convert(read_gguf(file), tmp_path / "out", Recorder(), "for a test")

    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["rope_type"] == "default"


def test_other_divisors_are_refused_with_their_range(tmp_path: Path) -> None:
    file = write_with_divisors(tmp_path / "tiny.gguf", [1.0] * 4 + [8.0] * 4)

    with pytest.raises(UnsupportedModel, match=r"divisors from 1 to 8 \(rope_freqs.weight\)"):
        convert(read_gguf(file), tmp_path / "out", Recorder(), "for a test")


def header(architecture: str, tensors: tuple[str, ...] = (), **values: Any) -> Any:
    said = {f"{architecture}.rope.scaling.{name}": value for name, value in values.items()}
    named = [SimpleNamespace(name=name) for name in tensors]
    return SimpleNamespace(
        file=Path("some.gguf"), header=SimpleNamespace(architecture=architecture, values=said, tensors=named)
    )


def test_a_linear_scaling_is_that_of_full_attention_alone() -> None:
    config = AutoConfig.for_model("gemma3_text")

    add_scaling(config, header("gemma3", type="linear", factor=8.0))

    assert config.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_yarn_needs_the_length_that_it_extends() -> None:
    config = AutoConfig.for_model("qwen2")

    add_scaling(config, header("qwen2", type="yarn", factor=4.0, original_context_length=32_768))

    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == 32_768
    with pytest.raises(UnsupportedModel, match="'yarn' and 4"):
        add_scaling(AutoConfig.for_model("qwen2"), header("qwen2", type="yarn", factor=4.0))


def test_a_scaling_that_transformers_read_stays_as_it_is() -> None:
    config = AutoConfig.for_model("qwen2", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})

    add_scaling(config, header("qwen2", type="linear", factor=8.0))

    assert config.rope_parameters["rope_type"] == "dynamic"


def test_lists_of_divisors_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(UnsupportedModel, match="the model's original repository"):
        add_scaling(AutoConfig.for_model("phi3"), header("phi3", ("rope_factors_long.weight", "rope_factors_short.weight")))
