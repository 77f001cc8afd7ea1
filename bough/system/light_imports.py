"""Importing torch and transformers in a process that only runs models.

Their imports are most of the time until the first word, and much of what they do is useless to such a process:
- transformers' model code imports torch's compiler, and distributed tensors, which import sympy;
- the garbage collector looks through all that was imported, again and again.

`make_imports_light` changes later imports. A name that was left out is imported when it is used, except for transformers'
own code for several machines, which stays off: so a library must not call this. Modules that were imported before stay as
they are. With the default model on two cores this saves 0.9 of 3.2 s of processor time.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MODEL_CODE = ("transformers.modeling_utils", "transformers.masking_utils")
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def make_imports_light() -> None:
    """Make later imports of transformers light in this process."""
    sys.meta_path.insert(0, _LightFinder())


class _LightFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _MODEL_CODE else None
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            loader.exec_module = partial(_run_lightly, loader.exec_module)
        return spec


def _run_lightly(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run a module's code with what is light in place."""
    with _without_compiler_and_distribution():
        run(module)
    gc.freeze()  # what is imported stays: looking through all of it takes as long as reading a tokenizer


@contextmanager
def _without_compiler_and_distribution() -> Iterator[None]:
    """While model code is imported: a stand-in for torch's compiler, and no distributed tensors.

    With a GPU nothing changes: there the compiler may be used.
    """
    import torch
    from transformers.utils.import_utils import is_torch_distributed_available

    if torch.cuda.is_available() or _COMPILER in sys.modules:
        yield
        return
    finder = _StandInFinder()
    distributed: Any = torch.distributed
    is_available = distributed.is_available
    distributed.is_available = lambda: False
    sys.meta_path.insert(0, finder)
    try:
        is_torch_distributed_available()  # which remembers the answer
        yield
    finally:
        distributed.is_available = is_available
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]  # from now on an import of the compiler is a real one
        if isinstance(vars(torch).get("_dynamo"), _StandIn):
            del torch._dynamo


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_compiler = fullname == _COMPILER or fullname.startswith(f"{_COMPILER}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_compiler else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _StandIn(ModuleType):
    """A module whose names are looked up in the real one when they are used. Marks for the compiler have no effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _MARKS:
            return _mark
        return _Later(self.__name__, name)


def _mark(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function if function is not None else lambda each: each


class _Later:
    """A class or function that is imported when it is called."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._name)(*args, **kwargs)
