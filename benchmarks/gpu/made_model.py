"""A model with random weights, whose tokens are words, so that answers have text as those of a real model do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.streams.model import make_word_runtime
from bough.config import load_settings
from bough.runtime import Runtime, make_shape


def load_made_model(shape: Mapping[str, Any], settings: Mapping[str, Any]) -> Runtime:
    """A runtime over random weights of this shape."""
    chosen = load_settings(dict(settings))
    with TemporaryDirectory(prefix="bough-gpu-") as folder:
        return make_word_runtime(make_shape(dict(shape), chosen), chosen, Path(folder))
