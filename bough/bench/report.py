"""Parts of every benchmark's report: the processor and how busy it is, and plots as files."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import RequestError
from bough.system.distribution import install_command

_CPU_INFO = Path("/proc/cpuinfo")
_EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm", "sve")


@dataclass(frozen=True)
class Machine:
    """A processor: its model, the number of its cores, and those of its instruction sets that matter for speed."""

    cpu: str
    cores: int
    extensions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores ({', '.join(self.extensions) or 'instruction sets unknown'})"


def read_machine() -> Machine:
    """This machine, as far as the system says."""
    try:
        lines = [line.partition(":") for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []
    known = {name.strip().lower(): text.strip() for name, _, text in reversed(lines)}
    flags = (known.get("flags") or known.get("features") or "").split()
    cpu = known.get("model name") or platform.processor() or platform.machine()
    return Machine(cpu, os.cpu_count() or 1, tuple(each for each in _EXTENSIONS if each in flags))


def read_load() -> float:
    """The mean number of processes that ran or waited in the last minute."""
    return round(os.getloadavg()[0], 2)


def load_warning() -> str | None:
    """A warning if the machine is busy, because the times are then unreliable."""
    cores, load = os.cpu_count() or 1, read_load()
    if load <= 0.5 * cores:
        return None
    return f"the machine is busy (load {load:.1f} on {cores} cores): the times below are noisy"


def require_matplotlib() -> None:
    """Raise RequestError, with the command to install it, if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise RequestError(f"plots need matplotlib: {install_command('bench')} ({error})") from error


@contextmanager
def drawing(file: Path, width: float = 8, height: float = 4.5) -> Iterator[Any]:
    """A matplotlib figure to draw on, which is written at the end. Raises RequestError if it cannot be written."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise RequestError(f"the plot cannot be written: {error}") from error
