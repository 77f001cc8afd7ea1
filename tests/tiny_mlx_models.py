"""The models of `tiny_models`, with the same weights, as the MLX engine loads them.

Each is saved by transformers and loaded by the MLX engine, once per name and overrides: tests share it, and do
not change it.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from bough.config import Settings
from bough.engines.mlx.loading.model import MlxModel, load_model
from tests import tiny_models

DEVICE = os.environ.get("MLX_TEST_DEVICE", "cpu")
"""Where the engine's tests run: "gpu" on a Mac tries Metal."""


def make_loaded(name: str, **overrides: Any) -> MlxModel:
    """The random model of the entry `name`, in float32."""
    return _load(name, json.dumps(overrides, sort_keys=True))


@cache
def _load(name: str, overrides: str) -> MlxModel:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.make_folder(name, Path(folder), **json.loads(overrides))
        return load_model(Path(folder), Settings(device=DEVICE, dtype="float32"))
