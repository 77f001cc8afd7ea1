"""The shared library of the CPU kernels: where it is, what it holds, what this machine can run, and its functions.

`setup.py` builds it from `kernels/`, once for each instruction set (ISA): `bough_v3_linear` and `bough_avx512_linear` are
the same source under other flags. The library knows nothing of Python, and this module nothing of torch: pointers go in as
integers. It may be missing or of another version, which `KernelsMissing` says in words for people.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough.errors import KernelsMissing
from bough.system.distribution import DISTRIBUTION, reinstall_command

ABI = 5  # of the functions in kernels/: to be raised there and here whenever a signature or a struct changes
ISAS = {
    "vnni": "AVX512-VNNI",
    "avx512": "AVX512",
    "avxvnni": "AVX-VNNI",
    "v3": "AVX2",
    "neon": "NEON",
    "plain": "plain C",
}
"""The instruction sets that kernels may be built for, the best first, as people call them."""

FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
BLOCK_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
TYPES = FLOAT_TYPES | BLOCK_TYPES
"""The types of weights that the kernels multiply with, and the numbers that ggml gives them."""

_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_FOLDER = Path(__file__).parent
LIBRARY = _FOLDER / "_kernels.so"
_MAPS = Path("/proc/self/maps")
_NOTES = "_kernels.txt"  # beside the library: what setup.py could not build, and why


class Kernels:
    """The kernels for one instruction set. Its functions release the interpreter's lock while they run.

    Their arguments are those of the C functions, with addresses as integers. The caller has checked shapes and types.
    """

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self._library = library
        self.linear = self._bind("linear", None, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _INT, _ADDRESS, _INT)
        self.linear_floats = self._bind("linear_floats", ctypes.c_int64, _ADDRESS, _INT, _INT)
        self.unpack = self._bind("unpack", None, _ADDRESS, _ADDRESS, _INT)
        self.gather = self._bind("gather", None, _ADDRESS, _ADDRESS, _INT, _ADDRESS)
        self.pack = self._bind("pack", None, _ADDRESS, _ADDRESS, _INT)
        self.panels_bytes = self._bind("panels_bytes", ctypes.c_int64, _INT, _INT, _INT)
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


def load_kernels(isa: str = "", path: Path = LIBRARY) -> Kernels:
    """The kernels for an instruction set, by default for the best that this machine can run.

    Raises KernelsMissing if there is no library, if it cannot be loaded, or if it does not have that set.
    """
    library = _open(path)
    found = _find_in(library)
    chosen = isa or found[0]
    if chosen not in found:
        raise KernelsMissing(f"there are no kernels for {chosen}, only for {', '.join(found)}", "")
    return Kernels(library, chosen)


def find_isas(path: Path = LIBRARY) -> list[str]:
    """The instruction sets that the library holds and this machine can run, the best first. Raises KernelsMissing."""
    return _find_in(_open(path))


def explain_missing_isa(path: Path = LIBRARY) -> str:
    """Why the kernels do not use the best instruction set of this machine; "" if they do. Raises KernelsMissing."""
    library = _open(path)
    best, used = _runnable(library)[0], _find_in(library)[0]
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
        abi = library.bough_plain_abi()
    except (OSError, AttributeError) as error:
        raise KernelsMissing(f"{path} cannot be used: {error}", f"build it again: {_rebuild_command()}") from error
    if abi != ABI:
        text = f"{path} has version {abi} of the kernels, and this Bough needs {ABI}"
        raise KernelsMissing(text, f"build it again: {_rebuild_command()}")
    return library


def _find_in(library: ctypes.CDLL) -> list[str]:
    return [isa for isa in _runnable(library) if hasattr(library, f"bough_{isa}_abi")]


def _runnable(library: ctypes.CDLL) -> list[str]:
    """The instruction sets that this machine can run, the best first."""
    return [isa for isa in ISAS if library.bough_can_run(isa.encode())]


def _read_notes(path: Path) -> list[str]:
    notes = path.with_name(_NOTES)
    return notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []


def _rebuild_command() -> str:
    """What to type to build the library: in a source folder that is installed as it is, or from the source package."""
    return reinstall_command("--no-cache-dir", "--no-binary", DISTRIBUTION)


def find_parallel() -> int | None:
    """The address of `GOMP_parallel` in the one GNU OpenMP runtime of this process; None if there is none, or several.

    torch has loaded it, and the kernels use its threads. These wait for their next work by spinning, and two sets of
    threads would take the cores from each other: with torch's default settings a step and the choice of its token took
    13.2 ms with threads of our own, and 8.7 with torch's. Only GNU's runtime is known here, on Linux; elsewhere the kernels
    have threads of their own.
    """
    found = _find_runtimes()
    if len(found) != 1:
        return None
    try:
        runtime = ctypes.CDLL(found.pop(), mode=os.RTLD_NOLOAD)  # the one that is there, never another
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _find_runtimes() -> set[str]:
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    paths = {line.partition("/")[1] + line.partition("/")[2] for line in lines if "/" in line}
    return {path for path in paths if Path(path).name.startswith(("libgomp.so", "libgomp-"))}
