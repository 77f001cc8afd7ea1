"""Errors of PyTorch, translated where they enter: out of memory, a kernel that failed, a driver that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bough.errors import EngineError


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the one behind it, says that memory was short: that passes, and tells nothing of a model."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, EngineError) and is_out_of_memory(error.__cause__)
    )


@contextmanager
def as_engine_errors(what: str) -> Iterator[None]:
    """Raise EngineError for what PyTorch or a model's own code raises inside; our own assertions pass. Also a decorator."""
    try:
        yield
    except (AssertionError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"{what} failed: {type(error).__name__}: {error}") from error
