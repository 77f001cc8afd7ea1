"""Errors of a tensor library or of a model's own code, translated where they enter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bough.errors import EngineError


@contextmanager
def as_engine_errors(what: str) -> Iterator[None]:
    """Raise EngineError for what a library or a model raises inside; our own assertions pass. Also a decorator."""
    try:
        yield
    except (AssertionError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"{what} failed: {type(error).__name__}: {error}") from error
