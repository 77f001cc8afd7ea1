"""Finds the OpenMP runtime that torch has loaded, so that the kernels can use its threads.

torch's threads wait for their next work by spinning, and two sets of threads would take the cores from each other: with
torch's default settings a step and the choice of its token took 13.2 ms with threads of our own, and 8.7 with torch's. Only
GNU's runtime is known here, on Linux. Everywhere else the kernels have threads of their own.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def find_parallel() -> int | None:
    """The address of `GOMP_parallel` in the one GNU OpenMP runtime of this process; None if there is none, or several."""
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
