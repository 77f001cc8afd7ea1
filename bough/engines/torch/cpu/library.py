"""The shared library of the CPU kernels: where it is, what it holds, what this machine can run, and its functions.

`setup.py` builds it from `kernels.c`, once for each instruction set (ISA): `bough_v3_linear` and `bough_avx512_linear` are
the same source under other flags. The library knows nothing of Python, and this module nothing of torch: pointers go in as
integers. It may be missing or of another version, which `KernelsMissing` says in words for people.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough.errors import KernelsMissing
from bough.system.distribution import DISTRIBUTION, reinstall_command

ABI = 3  # of the functions in kernels.c: to be raised there and here whenever a signature or a struct changes
ISAS = {"avx512": "AVX512", "v3": "AVX2", "neon": "NEON", "plain": "plain C"}  # the best first, as people call them
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_FOLDER = Path(__file__).parent
_LIBRARY = _FOLDER / "_kernels.so"
_NOTES = "_kernels.txt"  # beside the library: what setup.py could not build, and why


class Kernels:
    """The kernels for one instruction set. Its functions release the interpreter's lock while they run.

    Their arguments are those of kernels.c, with addresses as integers. The caller has checked shapes and types.
    """

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self._library = library
        self.linear = self._bind("linear", None, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _ADDRESS, _INT)
        self.unpack = self._bind("unpack", None, _ADDRESS, _ADDRESS, _INT)
        self.gather = self._bind("gather", None, _ADDRESS, _ADDRESS, _INT, _ADDRESS)
        self.panel_floats = self._bind("panel_floats", ctypes.c_int64, _INT)
        self.step_floats = self._bind("step_floats", ctypes.c_int64, _ADDRESS, _ADDRESS)
        self.share_threads = self._bind("share_threads", None, _ADDRESS)
        self.step = self._bind("step", None, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)

    def __repr__(self) -> str:
        return f"Kernels({self.isa!r})"

    @property
    def title(self) -> str:
        """The instruction set as people call it."""
        return ISAS[self.isa]

    @property
    def code_hash(self) -> str:
        """A hash of the library: a verdict of the self-check holds for one build of it."""
        return hashlib.sha256(Path(self._library._name).read_bytes()).hexdigest()

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function of the library, with the types that ctypes converts to."""
        function = self._library[f"bough_{self.isa}_{name}"]
        function.restype, function.argtypes = result, arguments
        return function


def load_kernels(isa: str = "", path: Path = _LIBRARY) -> Kernels:
    """The kernels for an instruction set, by default for the best that this machine can run.

    Raises KernelsMissing if there is no library, if it cannot be loaded, or if it does not have that set.
    """
    library = _open(path)
    found = _find_in(library)
    chosen = isa or found[0]
    if chosen not in found:
        raise KernelsMissing(f"there are no kernels for {chosen}, only for {', '.join(found)}", "")
    return Kernels(library, chosen)


def find_isas(path: Path = _LIBRARY) -> list[str]:
    """The instruction sets that the library holds and this machine can run, the best first. Raises KernelsMissing."""
    return _find_in(_open(path))


def explain_missing_isa(path: Path = _LIBRARY) -> str:
    """Why the kernels do not use the best instruction set of this machine; "" if they do. Raises KernelsMissing."""
    library = _open(path)
    best, used = _best_of_machine(library), _find_in(library)[0]
    if best == used:
        return ""
    lines = _read_notes(path)
    why = next((line.partition(": ")[2] for line in lines if line.startswith(f"{best}: ")), "it was not built")
    return f"{ISAS[best]} is missing: {why}"


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        why = "; ".join(_read_notes(path)) or "the library was not built"
        raise KernelsMissing(why, f"with a C compiler such as gcc installed, run: {_rebuild_command()}")
    try:
        library = ctypes.CDLL(str(path))
        library.bough_best_isa.restype = ctypes.c_char_p
        abi = library.bough_plain_abi()
    except (OSError, AttributeError) as error:
        raise KernelsMissing(f"{path} cannot be used: {error}", f"build it again: {_rebuild_command()}") from error
    if abi != ABI:
        text = f"{path} has version {abi} of the kernels, and this Bough needs {ABI}"
        raise KernelsMissing(text, f"build it again: {_rebuild_command()}")
    return library


def _find_in(library: ctypes.CDLL) -> list[str]:
    names = list(ISAS)
    can_run = names[names.index(_best_of_machine(library)) :]
    return [isa for isa in can_run if hasattr(library, f"bough_{isa}_abi")]


def _best_of_machine(library: ctypes.CDLL) -> str:
    return str(library.bough_best_isa().decode())


def _read_notes(path: Path) -> list[str]:
    notes = path.with_name(_NOTES)
    return notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []


def _rebuild_command() -> str:
    """What to type to build the library: in a source folder that is installed as it is, or from the source package."""
    return reinstall_command("--no-cache-dir", "--no-binary", DISTRIBUTION)
