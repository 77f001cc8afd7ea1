"""The code that computes a model's numbers: state that other code computed must not be used.

It is described by the source files of the model's own modules and of those that models of a library share, as they are
installed, and by the minor versions of the libraries. Patch versions, builds and instruction sets do not count: they change
numbers by rounding at most, unless one of these files changed. Bough's own code is described by `NUMERICS` alone.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bough.engines.contract import EngineCode

NUMERICS = 2
"""Raise it when kernels, lanes or loading change so that their numbers differ from before by more than rounding."""


def describe_code(versions: Mapping[str, str], sources: Iterable[type[Any] | ModuleType]) -> EngineCode:
    """The code of a model: libraries with their versions, and the classes and modules whose files determine its numbers."""
    minors = [f"{name} {'.'.join(version.split('.')[:2])}" for name, version in versions.items()]
    return EngineCode(", ".join([*minors, f"numerics {NUMERICS}"]), hash_sources(sources))


def hash_sources(sources: Iterable[type[Any] | ModuleType]) -> str:
    """A hash of the files that classes and modules are written in. A file that cannot be read does not count."""
    files = {file for source in sources if (file := _file_of(source)) is not None}
    return hashlib.sha256("".join(sorted(map(_hash_file, files))).encode()).hexdigest()


def _file_of(source: type[Any] | ModuleType) -> Path | None:
    try:
        return Path(inspect.getfile(source))
    except (TypeError, OSError):  # not imported from a file, or from one that is no module
        code = getattr(getattr(source, "__call__", None), "__code__", None)  # noqa: B004  # its file is wanted
        return None if code is None else Path(code.co_filename)


def _hash_file(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
