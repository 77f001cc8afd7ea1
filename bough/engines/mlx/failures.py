"""Errors of MLX: which of them say that memory was short."""

from __future__ import annotations

from bough.errors import EngineError

_WORDS = ("malloc", "allocate", "Insufficient Memory", "OutOfMemory")  # MLX has no type of its own for it


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one behind it, says that memory was short: that passes, and tells nothing of a model."""
    if isinstance(error, EngineError):
        return is_out_of_memory(error.__cause__)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in _WORDS)
    )
