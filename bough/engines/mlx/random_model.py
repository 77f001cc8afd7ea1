"""A model of a given shape with random weights: for benchmarks of sizes that nobody wants to download."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
from transformers import AutoConfig

from bough.config import Settings
from bough.engines.mlx.loading.dialect import translate
from bough.engines.mlx.loading.families import model_classes
from bough.engines.mlx.loading.model import LoadedModel, prepare, use_device


def make_random_model(config: dict[str, Any], settings: Settings) -> LoadedModel:
    """A model of this transformers configuration in the type that the settings ask for; the same weights every time."""
    use_device(settings.device)
    shape = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    said = translate(shape)
    model_class, arguments = model_classes(said.config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(said.config))
    prepare(model, settings)
    return LoadedModel(model, said.config, said.warnings)
