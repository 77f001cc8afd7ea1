"""The device of the torch engine, the type that it computes in, and its memory."""

from __future__ import annotations

import torch
from torch import nn

from bough.engines.shared.errors import is_memory_error
from bough.errors import ModelError
from bough.system.resources import read_host_memory

_SHARE = {"cuda": 0.8, "mps": 0.5, "cpu": 0.25}  # the rest is for activations, and on a CPU for the user's other programs


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" takes CUDA, then MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"there is no device {name!r}: use auto, cpu, cuda, cuda:1 or mps") from error
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not is_there.get(device.type, True) or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise ModelError(f"the device {name!r} is not available here")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of that name; "auto" takes float32 on a CPU, where half precision is slow, and bfloat16 elsewhere."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in known:
        raise ModelError(f"dtype is {name!r}, and must be auto, {', '.join(known)}")
    return known[name]


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights. A model whose weights are all packed has no parameters: it is on the CPU."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type that a model computes in: with packed weights float32."""
    first = next(model.parameters(), None)
    return torch.float32 if first is None else first.dtype


def default_budget_bytes(device: torch.device) -> int:
    """The default budget of lanes and pages: a share of the memory that is free now."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        free = read_host_memory().available_bytes
    return int(free * _SHARE.get(device.type, 0.25))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of PyTorch, or the cause of ours, means that memory was short."""
    return is_memory_error(error, lambda each: isinstance(each, torch.OutOfMemoryError))
