"""How much memory a device can still give, once the model is loaded."""

from __future__ import annotations

import torch

from bough.system.resources import read_host_memory

_SHARE = {"cuda": 0.8, "mps": 0.5, "cpu": 0.25}  # the rest is for activations, and on a CPU for the user's other programs


def default_budget_bytes(device: torch.device) -> int:
    """What lanes and pages may take if the user does not say: a share of what is free now."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        free = read_host_memory().available_bytes
    return int(free * _SHARE.get(device.type, 0.25))
