"""What a verdict on an mlx-lm model depends on."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import mlx.core as mx

from bough.engines.mlx.forward import Forward
from bough.engines.mlx.library import VERSION
from bough.engines.mlx.loading.model import weights_of
from bough.engines.self_check.verdicts import code_of, hash_of

_FORMAT = 2  # raise it when the check itself changes
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def key_of(forward: Forward) -> str:
    """A hash of versions, device, types, code, and the configuration, in which quantization is told, less its name."""
    features = [
        _FORMAT,
        "mlx",
        importlib.metadata.version("mlx"),
        VERSION,
        str(mx.default_device()),
        mx.device_info().get("architecture", ""),
        sorted({str(array.dtype) for array in weights_of(forward.model).values()}),
        type(forward.model).__qualname__,
        code_of(forward.model),
        _features_of(forward.config),
    ]
    return hash_of(features)


def _features_of(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NO_FEATURES}
