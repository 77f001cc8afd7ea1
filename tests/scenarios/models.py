"""The models that every scenario is played on: seven kinds on the fake engine, ten architectures on torch and on MLX."""

from __future__ import annotations

from typing import Any

import pytest

from bough.engines.choice import find_installed
from tests.fakes import MODELS
from tests.scenarios import torch_world
from tests.scenarios.model_world import ARCHITECTURES, ModelWorld
from tests.scenarios.world import World

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 5, 30, 31, 32]

_needs_mlx = pytest.mark.skipif("mlx" not in find_installed(), reason="MLX is not installed")
_on_torch = [f"torch:{name}" for name in ARCHITECTURES]
_on_mlx = [pytest.param(f"mlx:{name}", marks=(pytest.mark.mlx, _needs_mlx)) for name in ARCHITECTURES]

every_model = pytest.mark.parametrize("model", [*MODELS, *_on_torch, *_on_mlx])
every_fake = pytest.mark.parametrize("model", MODELS)
every_page = pytest.mark.parametrize("page_tokens", [2, 256])


def world(model: str, page_tokens: int = 2, **settings: Any) -> World:
    engine, _, name = model.rpartition(":")
    if engine == "torch":
        return ModelWorld(torch_world.make_subject(name), page_tokens, **settings)
    if engine == "mlx":
        from tests.scenarios import mlx_world  # only where MLX is

        return ModelWorld(mlx_world.make_subject(name), page_tokens, **settings)
    return World(MODELS[model], page_tokens, **settings)
