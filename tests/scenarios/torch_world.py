"""The engines that scenarios are played on with torch."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bough.config import Settings
from bough.engines.torch import TorchEngine
from tests.scenarios.model_world import ARCHITECTURES, Subject
from tests.tiny_models import make_model


@functools.cache
def make_subject(name: str) -> Subject:
    torch.set_num_threads(1)
    model = make_model(name, **ARCHITECTURES[name])
    with tempfile.TemporaryDirectory() as folder:  # no verdict of an earlier run
        engine = TorchEngine(model, Settings(cache_folder=Path(folder), chunk=8))
    return Subject(name, engine, functools.partial(_failing_after, _layers(model)))


@contextmanager
def _failing_after(layers: list[Any], number: int) -> Iterator[None]:
    """Forward passes run into an error once this layer, or the last one, has taken the tokens in."""

    def stop(*_: object) -> None:
        raise RuntimeError("made to fail in mid-forward")

    hook = layers[min(number, len(layers) - 1)].register_forward_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def _layers(model: Any) -> list[Any]:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))
