"""Random models of a few thousand weights, one per architecture: the engine tests need shapes, not knowledge.

The same name always gives the same weights. A folder made here holds a config and one safetensors file, and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "tiny_models.json").read_text(encoding="utf-8")
)
SEED = 20
ON_MLX = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "mamba2",
    "granitemoehybrid",
    "nemotron_h",
    "mamba",
)
"""Those that mlx-lm computes as transformers does."""

OF_EACH_KIND = ("llama", "gemma3_text", "gemma3n_text", "qwen3_next", "falcon_h1", "mamba2", "jamba")
"""Full attention, windows, shared rows, states beside attention and in one layer with it, states alone; one more hybrid."""

_KNOWN_WRONG: dict[str, dict[str, Any]] = (
    {} if Version(transformers.__version__) >= Version("5.23") else {"mamba2": {"n_groups": 1}}
)
"""What this version of transformers is not asked for: until 5.23 it normed all groups of mamba2 together."""


def others_slow(names: Iterable[str]) -> list[Any]:
    """These architectures as parameters of a test: one of each kind always, the others with `--slow`.

    For tests of a whole program: tests/contract/test_parity.py compares the logits of all architectures.
    """
    return [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow) for name in names]


def make_config(name: str, **overrides: Any) -> Any:
    """The transformers configuration of the entry `name`, with `overrides` on top."""
    return AutoConfig.for_model(name, **(CONFIGS[name] | _KNOWN_WRONG.get(name, {}) | overrides))


def make_model(name: str, **overrides: Any) -> Any:
    """A random model of the entry `name` in float32, ready for inference. Leaves torch's own random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(make_config(name, **overrides), dtype=torch.float32)
    return model.eval()


def make_folder(name: str, folder: Path, **overrides: Any) -> Path:
    """The model of `make_model`, saved as a Hugging Face folder at `folder`."""
    make_model(name, **overrides).save_pretrained(folder)
    return folder


def make_pickled_folder(name: str, folder: Path, has_index: bool) -> Path:
    """The same folder with a pickle for its weights; if wished, an index of safetensors names it."""
    make_folder(name, folder)
    weights = make_model(name).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    if has_index:
        names = dict.fromkeys(weights, "pytorch_model.bin")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    return folder
