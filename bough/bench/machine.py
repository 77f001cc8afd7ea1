"""What a benchmark says about the machine that it runs on: its processor, and how busy it is."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_machine(cpu_info: Path = _CPU_INFO) -> Machine:
    """This machine, as well as the system tells."""
    try:
        lines = [line.partition(":") for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []
    known = {name.strip().lower(): text.strip() for name, _, text in reversed(lines)}
    flags = (known.get("flags") or known.get("features") or "").split()
    cpu = known.get("model name") or platform.processor() or platform.machine()
    return Machine(cpu, os.cpu_count() or 1, tuple(each for each in _EXTENSIONS if each in flags))


def read_load() -> float | None:
    """How many processes ran or waited on the average of the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def load_warning() -> str | None:
    """A warning if the machine is busy, because the times are then unreliable."""
    cores, load = os.cpu_count() or 1, read_load() or 0.0
    if load <= 0.5 * cores:
        return None
    return f"the machine is busy (load {load:.1f} on {cores} cores): the times below are noisy"
