"""What a verdict on a transformers model depends on."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bough.engines.self_check.verdicts import code_of, hash_of

_FORMAT = 4  # raise it when the check itself changes
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def key_of(model: Any, wanted_attention: str) -> str:
    """A hash of versions, device, dtype, attention, and the configuration less its name."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NO_FEATURES}
    parameter = next(model.parameters())
    features = [
        _FORMAT,
        transformers.__version__,
        torch.__version__,
        parameter.device.type,
        str(parameter.dtype),
        wanted_attention,
        model.config._attn_implementation,
        type(model).__name__,
        code_of(model),
        config,
    ]
    return hash_of(features)
