"""Memory, disk space and processors of this machine, and the default budgets that Bough derives from them.

The memory of this process is limited by the machine and by every control group that it is in. A limit that cannot be read
on this system is ignored.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bough.errors import SettingsError

_DISK_FREE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class HostMemory:
    """The most memory that this process may have, and how much it can still get now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class _GroupFiles:
    """The files of one version of control groups, and the name of its memory controller in /proc/self/cgroup."""

    controller: str
    mount: str
    limit: str
    used: str
    cached: str  # the line of memory.stat that counts cached files, which the kernel drops when it needs memory


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSIONS = (
    _GroupFiles("memory", "sys/fs/cgroup/memory", *_VERSION_1),
    _GroupFiles("", "sys/fs/cgroup", *_VERSION_2),
    _GroupFiles("", "sys/fs/cgroup/unified", *_VERSION_2),
)
_GPU_DEVICES = ("nvidiactl", "kfd", "dxg")  # of CUDA, of ROCm, and of both inside Windows
_CPU_MOUNTS = (  # the names of the CPU controller in /proc/self/cgroup, and where its groups are
    ("cpu", "sys/fs/cgroup/cpu"),
    ("cpu", "sys/fs/cgroup/cpu,cpuacct"),
    ("", "sys/fs/cgroup"),
    ("", "sys/fs/cgroup/unified"),
)


def default_host_bytes(memory: HostMemory | None = None) -> int:
    """A quarter of the machine's memory, but at most half of what is available now."""
    memory = memory or read_host_memory()
    return min(memory.total_bytes // 4, memory.available_bytes // 2)


def default_disk_bytes(folder: Path, disk_free_bytes: int = _DISK_FREE_BYTES, held_bytes: int = 0) -> int:
    """A fifth of the free space on the folder's file system, but so that `disk_free_bytes` stay free.

    `held_bytes` are those that the trees take already. They count as free, so that the budget does not shrink at the next
    start. Raises SettingsError if the free space cannot be read.
    """
    free_bytes = free_disk_bytes(folder) + held_bytes
    return max(0, min(free_bytes // 5, free_bytes - disk_free_bytes))


def free_disk_bytes(folder: Path) -> int:
    """The free space on the file system of a folder, which need not exist. Raises SettingsError if it cannot be read."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(nearest).free
    except OSError as error:
        raise SettingsError(f"cannot read the free space at {folder}: {error}") from error


def read_host_memory(system: Path = Path("/")) -> HostMemory:
    """The memory of this machine within the control groups of this process; `system` holds the folders proc and sys."""
    known = {name: int(rest.split()[0]) * 1024 for name, rest in _pairs(system / "proc/meminfo", ":") if rest.split()}
    totals = [known.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    available = [known["MemAvailable"]] if "MemAvailable" in known else []
    for files in _VERSIONS:
        for folder in _group_folders(system, files.controller, files.mount):
            limit, used = (_lines(folder / name) for name in (files.limit, files.used))
            if limit and used and limit[0].isdigit() and used[0].isdigit():
                cached = int(dict(_pairs(folder / "memory.stat")).get(files.cached, 0))
                totals.append(int(limit[0]))
                available.append(max(0, int(limit[0]) - int(used[0]) + cached))
    return HostMemory(min(totals), min(totals + available))


def may_have_gpu(system: Path = Path("/")) -> bool:
    """Whether a driver for a GPU of NVIDIA or AMD is loaded. If not, torch finds none, and need not be asked."""
    return any((system / "dev" / name).exists() for name in _GPU_DEVICES)


def limit_threads(num_threads: int, system: Path = Path("/")) -> int:
    """As many threads as the control groups of this process have CPU time for, rounded up, and at most `num_threads`.

    A container that may use two CPUs sees all of its machine. With a thread for each, the kernel stops all of them for most
    of the time.
    """
    quotas = [
        quota
        for controller, mount in _CPU_MOUNTS
        for folder in _group_folders(system, controller, mount)
        for quota in _cpu_quota(folder)
    ]
    return max(1, min([num_threads, *map(math.ceil, quotas)]))


def _cpu_quota(folder: Path) -> Iterator[float]:
    """The CPUs that a control group may use, if it has a limit: "max 100000" and -1 are none."""
    of_version_1 = [*_lines(folder / "cpu.cfs_quota_us")[:1], *_lines(folder / "cpu.cfs_period_us")[:1]]
    numbers = "".join(_lines(folder / "cpu.max")[:1]).split() or of_version_1
    if len(numbers) == 2 and all(each.isdigit() and int(each) for each in numbers):
        yield int(numbers[0]) / int(numbers[1])


def _group_folders(system: Path, controller: str, mount: str) -> Iterator[Path]:
    """The control groups of this process under a mount, from the innermost to the root."""
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        if controller in controllers.split(","):
            yield from (system / mount / group for group in (inner, *inner.parents))


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
    """Make the C library return freed memory to the system; returns False where it has no such call.

    Without it, a process that allocates pages of all sizes holds a fifth more than it uses after some hours.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
    return trim is not None
