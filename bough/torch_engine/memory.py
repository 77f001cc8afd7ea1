"""How much memory a device can still give, once the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_SHARE = {"cuda": 0.8, "mps": 0.5, "cpu": 0.25}  # the rest is for activations, and on a CPU for the user's other programs
_UNKNOWN = 2 * 2**30


def default_budget_bytes(device: torch.device) -> int:
    """What lanes and pages may take if the user does not say: a share of what is free now."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        free = min(_host_bounds(), default=_UNKNOWN)
    return int(free * _SHARE.get(device.type, 0.25))


def _host_bounds() -> Iterator[int]:
    """Everything that bounds this process: what the machine has available, and what its control group still allows."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    yield from _group_bounds(Path("/sys/fs/cgroup"))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bounds(folder: Path) -> Iterator[int]:
    limit, used = (_lines(folder / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        stat = dict(line.split() for line in _lines(folder / "memory.stat"))
        cached = int(stat.get("inactive_file", 0))  # files read before, which make way
        yield max(0, int(limit[0]) - int(used[0]) + cached)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
