"""Errors of a tensor library or of a model's own code, translated to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bough.errors import EngineError


@contextmanager
def as_engine_errors(what: str) -> Iterator[None]:
    """Raise EngineError for errors of a library or a model; our own assertions pass. Also a decorator."""
    try:
        yield
    except (AssertionError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"{what} failed: {type(error).__name__}: {error}") from error


def is_memory_error(error: BaseException | None, is_of_library: Callable[[BaseException], bool]) -> bool:
    """Whether an error, or the cause of an EngineError, means that memory was short, which proves nothing about a model.

    `is_of_library` recognises such errors of the engine's library.
    """
    while isinstance(error, EngineError):
        error = error.__cause__
    return isinstance(error, MemoryError) or (error is not None and is_of_library(error))
