"""Importing torch and transformers in a process that only runs models.

Their imports are most of the time until the first word, and much of what they do is of no use to such a process:
- transformers reads 1,600 of its files, twice, to know which names it has, and the files of every installed package;
- its model code imports torch's compiler, and distributed tensors, which import sympy;
- the garbage collector looks through all that was imported, again and again.

`make_imports_light` changes how they are imported from then on. What the process would need later is imported when it is
used, except for transformers' own code for several machines, which stays off: so a library must not call this. Modules
that were imported before stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from bough.system.folders import write_private

_FILE = "imports.json"
_COMPILER = "torch._dynamo"
_NAMES = "transformers.utils.import_utils"
_MODEL_CODE = ("transformers.modeling_utils", "transformers.masking_utils")
_INSTALLED = {"site-packages", "dist-packages"}
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def make_imports_light(find_folder: Callable[[], Path]) -> None:
    """Make later imports of torch and transformers light in this process.

    What transformers finds out about its own files and about the installed packages is kept in the folder that
    `find_folder` returns when transformers is imported, until one of them changes.
    """
    sys.meta_path.insert(0, _LightFinder(find_folder))


def load_torch_library() -> threading.Thread:
    """Load torch's largest shared library in a thread, while this one imports other things.

    If that fails, importing torch says why.
    """
    thread = threading.Thread(target=_load_torch_library, name="bough-torch-library", daemon=True)
    thread.start()
    return thread


def _load_torch_library() -> None:
    with contextlib.suppress(OSError, ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None and sys.platform == "linux":
            folder = Path(spec.origin).parent / "lib"
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)  # as torch does it
            ctypes.CDLL(str(folder / "libtorch_cpu.so"))


class _Notes:
    """Results that are slow to find out, in a JSON file, each with a stamp of what it was found out from."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, name: str, stamp: Any, compute: Callable[[], Any]) -> Any:
        """The result of this name and stamp, or else what `compute` returns now, which is then kept."""
        notes = self._read()
        known = notes.get(name)
        if isinstance(known, dict) and known.get("stamp") == stamp and "result" in known:
            return known["result"]
        result = compute()
        self._write({**notes, name: {"stamp": stamp, "result": result}})
        return result

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, notes: Mapping[str, Any]) -> None:
        """Write the file whole or not at all. In a folder that cannot be written, the next start computes again."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._file, json.dumps(notes))


class _LightFinder(importlib.abc.MetaPathFinder):
    """Finds the few modules that are imported in another way."""

    def __init__(self, find_folder: Callable[[], Path]) -> None:
        self._find_folder = find_folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAMES and fullname not in _MODEL_CODE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LightLoader(spec.loader, _Notes(self._find_folder() / _FILE))
        return spec


class _LightLoader(importlib.abc.Loader):
    """Runs a module's code with what is light in place, and leaves the module with its own loader."""

    def __init__(self, inner: Any, notes: _Notes) -> None:
        self._inner = inner
        self._notes = notes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._inner.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        if module.__name__ == _NAMES:
            with _known_distributions(self._notes):
                self._inner.exec_module(module)
            _remember_names(module, self._notes)
            return
        with _without_compiler_and_distribution():
            self._inner.exec_module(module)
        gc.freeze()  # what is imported stays: looking through all of it takes as long as reading a tokenizer


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """With another value for a name of a module."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)


@contextmanager
def _known_distributions(notes: _Notes) -> Iterator[None]:
    """Let `packages_distributions` return what it returned when the folders of packages were last changed."""
    find = importlib.metadata.packages_distributions
    folders = [Path(each) for each in sys.path if each and Path(each).is_dir()]
    stamp = [[str(each), each.stat().st_mtime_ns] for each in folders]
    with _replaced(
        importlib.metadata, "packages_distributions", lambda: notes.find("distributions", stamp, lambda: dict(find()))
    ):
        yield


def _remember_names(module: Any, notes: _Notes) -> None:
    """Let transformers keep which of its files has which names. It reads all of its models to find out."""
    define = getattr(module, "define_import_structure", None)
    if define is None:  # another version of transformers does it in another way
        return

    def define_once(module_path: str | Path, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
        folder = Path(module_path) if Path(module_path).is_dir() else Path(module_path).parent
        if folder.name != "models" or not _INSTALLED & set(folder.parts):  # small, or somebody's own work in progress
            found: dict[frozenset[str], dict[str, set[str]]] = define(module_path, prefix)
            return found
        flat = notes.find(f"names of {prefix or folder}", _stamp(folder), lambda: _flatten(define(module_path, prefix)))
        return {frozenset(backends): {name: set(each) for name, each in files.items()} for backends, files in flat}

    module.define_import_structure = define_once


def _stamp(folder: Path) -> list[list[Any]]:
    """That a package was not installed anew."""
    stats = [(file, file.stat()) for file in (folder, folder / "__init__.py", folder.parent / "__init__.py")]
    return [[str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for file, stat in stats]


def _flatten(structure: Mapping[frozenset[str], Mapping[str, set[str]]]) -> list[list[Any]]:
    """The same as JSON can hold it."""
    return [
        [sorted(backends), {name: sorted(each) for name, each in files.items()}] for backends, files in structure.items()
    ]


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
    sys.meta_path.insert(0, finder)
    try:
        with _replaced(torch.distributed, "is_available", lambda: False):
            is_torch_distributed_available()  # which remembers the answer
            yield
    finally:
        sys.meta_path.remove(finder)
        _remove_stand_ins(torch)


def _remove_stand_ins(torch: Any) -> None:
    """From now on an import of the compiler is a real one."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]
    if isinstance(vars(torch).get("_dynamo"), _StandIn):
        del torch._dynamo


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts stand-ins in the place of the compiler's modules."""

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
    """A decorator, with or without arguments, that changes nothing."""
    return function if function is not None else lambda each: each


class _Later:
    """A class or function that is imported when it is called."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._name)(*args, **kwargs)
