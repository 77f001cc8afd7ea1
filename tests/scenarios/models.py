"""The models that every scenario is played on: seven kinds on the fake engine, ten architectures on torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import MODELS
from tests.scenarios.torch_world import ARCHITECTURES, TorchWorld
from tests.scenarios.world import World

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 5, 30, 31, 32]

every_model = pytest.mark.parametrize("model", [*MODELS, *(f"torch:{name}" for name in ARCHITECTURES)])
every_fake = pytest.mark.parametrize("model", MODELS)
every_page = pytest.mark.parametrize("page_tokens", [2, 256])


def world(model: str, page_tokens: int = 2, **settings: Any) -> World:
    if model.startswith("torch:"):
        return TorchWorld(model.removeprefix("torch:"), page_tokens, **settings)
    return World(MODELS[model], page_tokens, **settings)
