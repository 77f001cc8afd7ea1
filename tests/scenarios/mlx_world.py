"""The engines that scenarios are played on with MLX."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bough.config import Settings
from bough.engines.mlx import MlxEngine
from tests.scenarios.model_world import ARCHITECTURES, Subject
from tests.tiny_mlx_models import make_loaded


@functools.cache
def make_subject(name: str) -> Subject:
    loaded = make_loaded(name, **ARCHITECTURES[name])
    with tempfile.TemporaryDirectory() as folder:  # no verdict of an earlier run
        engine = MlxEngine(loaded, Settings(cache_folder=Path(folder), chunk=8))
    return Subject(name, engine, functools.partial(_failing_after, list(loaded.model.layers)))


@contextmanager
def _failing_after(layers: list[Any], number: int) -> Iterator[None]:
    """Forward passes run into an error once this layer, or the last one, has taken the tokens in.

    A module of MLX has no hooks, and Python looks for `__call__` at its class, which others share: so that is replaced.
    """
    failing = layers[min(number, len(layers) - 1)]
    call = type(failing).__call__

    def stop(layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(layer, *args, **kwargs)
        if layer is failing:
            raise RuntimeError("made to fail in mid-forward")
        return result

    with patch.object(type(failing), "__call__", stop):
        yield
