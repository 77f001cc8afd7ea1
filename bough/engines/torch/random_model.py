"""A model of a given shape with random weights: for benchmarks of sizes that nobody wants to download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.torch.loading import choose_device, choose_dtype

_AUTO_MODEL: Any = AutoModelForCausalLM  # its types do not follow what it returns


def make_random_model(config: dict[str, Any], settings: Settings) -> Any:
    """Built on the device itself, in the type that the settings ask for; the same weights every time."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**config)
    with torch.device(device):
        return _AUTO_MODEL.from_config(shape, dtype=choose_dtype(settings.dtype, device))
