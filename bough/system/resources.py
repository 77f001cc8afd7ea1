"""What the machine has for the places that keep state: its memory and its disk, and what Bough takes if nobody says.

The memory of this process is bounded by the machine and by every control group that it is in. What cannot be read on this
system bounds nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bough.errors import SettingsError

_UNKNOWN_BYTES = 2 * 2**30
_DISK_FREE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class HostMemory:
    """The memory that this process may have in all, and what it can still get now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class _GroupFiles:
    """Where one version of control groups keeps its figures, and how /proc/self/cgroup calls its controller of memory."""

    controller: str
    mount: str
    limit: str
    used: str
    cached: str  # the line of memory.stat that counts files read before, which make way


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSIONS = (
    _GroupFiles("memory", "sys/fs/cgroup/memory", *_VERSION_1),
    _GroupFiles("", "sys/fs/cgroup", *_VERSION_2),
    _GroupFiles("", "sys/fs/cgroup/unified", *_VERSION_2),
)


def default_host_bytes(memory: HostMemory | None = None) -> int:
    """A quarter of the machine's memory, and never more than half of what is available now."""
    memory = memory or read_host_memory()
    return min(memory.total_bytes // 4, memory.available_bytes // 2)


def default_disk_bytes(folder: Path, disk_free_bytes: int = _DISK_FREE_BYTES, held_bytes: int = 0) -> int:
    """A fifth of what is free on the folder's file system, and never so much that less than `disk_free_bytes` stays free.

    `held_bytes` are those that the trees take already: they count as free, so that a store that has grown does not have to
    shrink at the next start. Raises SettingsError if the file system does not answer.
    """
    free_bytes = free_disk_bytes(folder) + held_bytes
    return max(0, min(free_bytes // 5, free_bytes - disk_free_bytes))


def free_disk_bytes(folder: Path) -> int:
    """What the file system that holds the folder, or would, can still take. Raises SettingsError if it is silent."""
    try:
        nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        return shutil.disk_usage(nearest).free
    except OSError as error:
        raise SettingsError(f"cannot tell how much is free at {folder}: {error}") from error


def read_host_memory(system: Path = Path("/")) -> HostMemory:
    """The memory of this machine, as the control groups of this process allow; `system` holds the folders proc and sys."""
    known = {name: int(rest.split()[0]) * 1024 for name, rest in _pairs(system / "proc/meminfo", ":") if rest.split()}
    totals = [known["MemTotal"]] if "MemTotal" in known else list(_physical_bytes())
    available = [known["MemAvailable"]] if "MemAvailable" in known else []
    for group in _group_bounds(system):
        totals.append(group.total_bytes)
        available.append(group.available_bytes)
    total_bytes = min(totals, default=_UNKNOWN_BYTES)
    return HostMemory(total_bytes, min([total_bytes, *available]))


def _physical_bytes() -> Iterator[int]:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bounds(system: Path) -> Iterator[HostMemory]:
    """What each control group of this process allows, from the innermost up to the root of what is mounted."""
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        for files in _VERSIONS:
            if files.controller in controllers.split(","):
                for group in (inner, *inner.parents):
                    yield from _group_bound(system / files.mount / group, files)


def _group_bound(folder: Path, files: _GroupFiles) -> Iterator[HostMemory]:
    limit, used = (_lines(folder / name) for name in (files.limit, files.used))
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        cached = int(dict(_pairs(folder / "memory.stat")).get(files.cached, 0))
        yield HostMemory(int(limit[0]), max(0, int(limit[0]) - int(used[0]) + cached))


def _pairs(file: Path, separator: str = " ") -> Iterator[tuple[str, str]]:
    for line in _lines(file):
        name, _, rest = line.partition(separator)
        yield name, rest


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def trim_heap() -> bool:
    """Let the C library return what it holds of freed memory to the system; False where it has no such call.

    Pages of all sizes come and go, and after some hours of that a process would hold a fifth more than it uses.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
    return trim is not None
