"""The models that every scenario is played on: on the fake engine, whose lanes copy or share rows, on torch, there also
on a pool, and on MLX.
"""

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

_pooled = [f"pooled:{name}" for name in ("full", "full+window", "full+recurrent", "window+recurrent+full")]

_on_pool = ["pool:gemma3_text", "pool:qwen3_next", pytest.param("pool:llama", marks=pytest.mark.slow)]

every_model = pytest.mark.parametrize("model", [*MODELS, *_pooled, *_on_torch, *_on_pool, *_on_mlx])
every_fake = pytest.mark.parametrize("model", [*MODELS, *_pooled])
copying_lanes = pytest.mark.parametrize("lane_kind", [False], indirect=True, ids=["copies"])
every_page = pytest.mark.parametrize("page_tokens", [2, 256])


def world(model: str, page_tokens: int = 2, **settings: Any) -> World:
    engine, _, name = model.rpartition(":")
    if engine == "torch":
        return ModelWorld(torch_world.make_subject(name), page_tokens, **settings)
    if engine == "pool":
        return ModelWorld(torch_world.make_pooled_subject(name), page_tokens, **settings)
    if engine == "mlx":
        from tests.scenarios import mlx_world  # only where MLX is

        return ModelWorld(mlx_world.make_subject(name), page_tokens, **settings)
    return World(MODELS[name], page_tokens, is_pooled=engine == "pooled", **settings)
