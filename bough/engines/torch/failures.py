"""Errors of PyTorch: which of them say that memory was short."""

from __future__ import annotations

import torch

from bough.errors import EngineError


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one behind it, says that memory was short: that passes, and tells nothing of a model."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, EngineError) and is_out_of_memory(error.__cause__)
    )
