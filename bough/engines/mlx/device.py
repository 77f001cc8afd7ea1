"""How much memory MLX may take, what it took, and when it gives some back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from bough.system.resources import read_host_memory

_GPU_SHARE = 0.7  # of what the system recommends and is free: the rest is for activations
_CPU_SHARE = 0.25
_TIDY_EVERY_TOKENS = 4_096


class Allocator:
    """MLX keeps freed memory for arrays of the same size. After a while most of it is of sizes that never come again."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def tidy(self, num_tokens: int) -> None:
        """Give unused memory back now and then; called with the tokens of each run."""
        self._num_tokens += max(num_tokens, _TIDY_EVERY_TOKENS // 256)
        if self._num_tokens >= _TIDY_EVERY_TOKENS:
            self._num_tokens = 0
            mx.clear_cache()


def require_bytes(nbytes: int) -> None:
    """Raise MemoryError if the machine has no room for so much: MLX's CPU build dies of memory that it does not get."""
    if mx.default_device() == mx.cpu and nbytes > (free_bytes := read_host_memory().available_bytes):
        raise MemoryError(f"a lane needs {nbytes:,} bytes more, and the machine has {free_bytes:,} left")


def default_budget_bytes() -> int:
    """What lanes and pages may take if the user does not say: a share of what is free now, once the model is loaded."""
    recommended = _recommended_bytes()
    if recommended:
        return int(max(0, recommended - mx.get_active_memory()) * _GPU_SHARE)
    return int(read_host_memory().available_bytes * _CPU_SHARE)


def wire() -> None:
    """Let the system keep as much as it recommends in memory, for all models of this process; nothing without a GPU."""
    recommended = _recommended_bytes()
    if recommended:
        mx.set_wired_limit(recommended)


def describe() -> str:
    """What MLX holds now and held at most, for people."""
    return f"{mx.get_active_memory() / 2**20:,.0f} MiB in use, {mx.get_peak_memory() / 2**20:,.0f} MiB at most"


def _recommended_bytes() -> int:
    """The memory that a GPU may use without slowing the machine down; 0 where MLX runs on the CPU or does not say."""
    if mx.default_device() != mx.gpu:
        return 0
    info: dict[str, Any] = mx.device_info()
    return int(info.get("max_recommended_working_set_size", 0) or info.get("memory_size", 0) or info.get("total_memory", 0))
