"""A folder whose weights are packed as MLX packs them: words of four or eight bits, with scales and biases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama",
    "quantization": {"group_size": 64, "bits": 4, "own": {"group_size": 32, "bits": 8}},
}


def write_packed_model(folder: Path) -> None:
    """A matrix of 64 × 128 in four bits, one of 32 × 64 in eight with a bias of its own, and a norm of 128."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    weights = {
        "usual.weight": np.zeros((64, 128 * 4 // 32), np.uint32),
        "usual.scales": np.zeros((64, 128 // 64), np.float16),
        "usual.biases": np.zeros((64, 128 // 64), np.float16),
        "own.weight": np.zeros((32, 64 * 8 // 32), np.uint32),
        "own.scales": np.zeros((32, 64 // 32), np.float16),
        "own.biases": np.zeros((32, 64 // 32), np.float16),
        "own.bias": np.zeros(32, np.float16),
        "norm.weight": np.zeros(128, np.float16),
    }
    save_file(weights, folder / "model.safetensors")
