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
_USUAL = ("mistral", "gemma3_text", "qwen3_next", "lfm2")  # the others with --slow


def _params(engine: str, *marks: pytest.MarkDecorator) -> list[Any]:
    """Every architecture on an engine."""
    slow = {name: () if name in _USUAL else (pytest.mark.slow,) for name in ARCHITECTURES}
    return [pytest.param(f"{engine}:{name}", marks=(*marks, *slow[name])) for name in ARCHITECTURES]


_on_torch = _params("torch")
_on_mlx = _params("mlx", pytest.mark.mlx, _needs_mlx)

_pooled = [f"pooled:{name}" for name in ("full", "full+window", "full+recurrent", "window+recurrent+full")]

_on_pool = ["pool:gemma3_text", *(pytest.param(f"pool:{name}", marks=pytest.mark.slow) for name in ("qwen3_next", "llama"))]

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
