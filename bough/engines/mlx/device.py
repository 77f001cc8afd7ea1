"""The device of the MLX engine, the type that it computes in, and its memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from bough.engines.shared.errors import is_memory_error
from bough.errors import ModelError
from bough.system.resources import read_host_memory

_GPU_SHARE = 0.7  # of what the system recommends and is free: the rest is for activations
_CPU_SHARE = 0.25
_TRIM_EVERY_TOKENS = 4_096
_TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_SHORT_OF_MEMORY = ("malloc", "allocate", "Insufficient Memory", "OutOfMemory")  # MLX has no type of its own for it


def use_device(name: str) -> None:
    """Let MLX compute on the device of that name; "auto" takes the GPU where MLX has one, else the CPU."""
    if name not in ("auto", "cpu", "gpu", "metal"):
        is_of_torch = name.partition(":")[0] in ("cuda", "mps")
        problem = f"the device {name!r} is the torch engine's" if is_of_torch else f"there is no device {name!r}"
        raise ModelError(f"{problem}: the mlx engine has auto, cpu and gpu")
    has_gpu = mx.is_available(mx.gpu)
    if name in ("gpu", "metal") and not has_gpu:
        raise ModelError(f"the device {name!r} is not available here: MLX finds no GPU")
    mx.set_default_device(mx.gpu if has_gpu and name != "cpu" else mx.cpu)


def choose_dtype(name: str, held: mx.Dtype, on_gpu: bool) -> mx.Dtype:
    """The type of that name for weights that are `held` in a type of their own.

    "auto" takes float32 on a CPU, where half precision is slow, with quantized weights most of all. On a GPU it takes
    bfloat16 in place of float32, and else the type of the files.
    """
    if name == "auto":
        return mx.float32 if not on_gpu else mx.bfloat16 if held == mx.float32 else held
    if name not in _TYPES:
        raise ModelError(f"dtype is {name!r}, and must be auto, {', '.join(_TYPES)}")
    return _TYPES[name]


class Allocator:
    """MLX keeps freed memory for arrays of the same size. After a while most of it has sizes that are not used again."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def trim(self, num_tokens: int) -> None:
        """Release unused memory every few thousand tokens; called with the tokens of each run."""
        self._num_tokens += max(num_tokens, _TRIM_EVERY_TOKENS // 256)
        if self._num_tokens >= _TRIM_EVERY_TOKENS:
            self._num_tokens = 0
            mx.clear_cache()


def require_bytes(nbytes: int) -> None:
    """Raise MemoryError if the machine has too little memory: MLX's CPU build crashes when an allocation fails."""
    if mx.default_device() == mx.cpu and nbytes > (free_bytes := read_host_memory().available_bytes):
        raise MemoryError(f"a lane needs {nbytes:,} bytes more, and the machine has {free_bytes:,} left")


def default_budget_bytes() -> int:
    """The default budget of lanes and pages: a share of the memory that is free once the model is loaded."""
    if recommended := _recommended_bytes():
        return int(max(0, recommended - mx.get_active_memory()) * _GPU_SHARE)
    return int(read_host_memory().available_bytes * _CPU_SHARE)


def wire() -> None:
    """Let the system keep as much as it recommends in memory, for all models of this process; nothing without a GPU."""
    if recommended := _recommended_bytes():
        mx.set_wired_limit(recommended)


def describe_memory() -> str:
    return f"{mx.get_active_memory() / 2**20:,.0f} MiB in use, {mx.get_peak_memory() / 2**20:,.0f} MiB at most"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of MLX, or the cause of ours, means that memory was short."""
    return is_memory_error(
        error, lambda each: isinstance(each, RuntimeError) and any(text in str(each) for text in _SHORT_OF_MEMORY)
    )


def _recommended_bytes() -> int:
    """The memory that a GPU may use without slowing the machine down; 0 where MLX runs on the CPU or reports none."""
    if mx.default_device() != mx.gpu:
        return 0
    info: dict[str, Any] = mx.device_info()
    names = ("max_recommended_working_set_size", "memory_size", "total_memory")
    return next((int(info[name]) for name in names if info.get(name)), 0)
