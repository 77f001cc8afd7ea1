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
from bough.engines.shared.pool.arena import Arena
from bough.engines.torch import TorchEngine
from tests.scenarios.model_world import ARCHITECTURES, Subject
from tests.tiny_models import make_model

_POOL_BYTES = 16 << 20


@functools.cache
def make_subject(name: str) -> Subject:
    torch.set_num_threads(1)
    model = make_model(name, **ARCHITECTURES[name])
    with tempfile.TemporaryDirectory() as folder:  # no verdict of an earlier run
        engine = TorchEngine(model, Settings(cache_folder=Path(folder), chunk=8))
    return Subject(name, engine, functools.partial(_failing_after, _layers(model)))


def make_pooled_subject(name: str) -> Subject:
    """The same on a pool of slots, which computes one step ahead of the caller. The pool is a new one each time."""
    engine, layers = _make_pooled(name)
    engine._pool = None
    engine.limit_device(_POOL_BYTES)
    return Subject(name, engine, functools.partial(_failing_after, layers), arena=arena_of(engine))


@functools.cache
def _make_pooled(name: str) -> tuple[TorchEngine, list[Any]]:
    torch.set_num_threads(1)
    model = make_model(name, **ARCHITECTURES[name])
    with tempfile.TemporaryDirectory() as folder:
        engine = TorchEngine(model, Settings(cache_folder=Path(folder), chunk=8), pools=True)
    return engine, _layers(model)


def arena_of(engine: TorchEngine) -> Arena:
    """The arena of an engine with a pool."""
    assert engine._pool is not None, engine.describe()["step"]
    return engine._pool.memory.arena


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
