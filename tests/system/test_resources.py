"""What the machine has: its memory under control groups of either version, and its disk."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from bough.errors import SettingsError
from bough.system import resources
from bough.system.resources import (
    HostMemory,
    default_disk_bytes,
    default_host_bytes,
    free_disk_bytes,
    limit_threads,
    read_host_memory,
    trim_heap,
)

KIB, GIB = 2**10, 2**30


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 64 GiB, of which 40 are available, and no control groups."""
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {40 * GIB // KIB} kB\nHugePages_Total: 0\n",
    )
    return tmp_path


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_without_groups_the_machine_alone_counts(system):
    assert read_host_memory(system) == HostMemory(64 * GIB, 40 * GIB)


def test_a_group_bounds_the_memory_and_what_it_caches_makes_way(system):
    write(system / "proc/self/cgroup", "0::/")
    write(system / "sys/fs/cgroup/memory.max", 8 * GIB)
    write(system / "sys/fs/cgroup/memory.current", 6 * GIB)
    write(system / "sys/fs/cgroup/memory.stat", f"anon {5 * GIB}\ninactive_file {1 * GIB}")

    assert read_host_memory(system) == HostMemory(8 * GIB, 3 * GIB)


def test_the_tightest_of_nested_groups_bounds(system):
    write(system / "proc/self/cgroup", "0::/user/session")
    for group, limit in (("user/session", "max"), ("user", 16 * GIB)):
        write(system / "sys/fs/cgroup" / group / "memory.max", limit)
        write(system / "sys/fs/cgroup" / group / "memory.current", GIB)

    assert read_host_memory(system) == HostMemory(16 * GIB, 15 * GIB)


def test_groups_of_the_first_version_bound_too(system):
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/\n4:cpuset,memory:/box\n0::/")
    write(system / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", 4 * GIB)
    write(system / "sys/fs/cgroup/memory/box/memory.usage_in_bytes", GIB)
    write(system / "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(system / "sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)

    assert read_host_memory(system) == HostMemory(4 * GIB, 3 * GIB)


@pytest.mark.parametrize(("limit", "num_threads"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 16)])
def test_a_group_that_limits_cpu_time_limits_threads(system, limit, num_threads):
    write(system / "proc/self/cgroup", "0::/box")
    write(system / "sys/fs/cgroup/box/cpu.max", limit)
    write(system / "sys/fs/cgroup/cpu.max", "max 100000")

    assert limit_threads(16, system) == num_threads


@pytest.mark.parametrize(("quota", "num_threads"), [(400_000, 4), (-1, 16)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_groups_of_the_first_version_limit_threads_too(system, mount, quota, num_threads):
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/docker/1a2b\n0::/")
    write(system / f"sys/fs/cgroup/{mount}/cpu.cfs_quota_us", quota)  # a container sees its own group as the root
    write(system / f"sys/fs/cgroup/{mount}/cpu.cfs_period_us", 100_000)

    assert limit_threads(16, system) == num_threads


def test_a_generous_group_gives_no_more_threads_than_there_are_cores(system):
    write(system / "proc/self/cgroup", "0::/")
    write(system / "sys/fs/cgroup/cpu.max", "6400000 100000")

    assert limit_threads(2, system) == 2


def test_a_machine_that_tells_nothing_in_files_is_asked_for_its_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "os", SimpleNamespace(sysconf=lambda name: 2**18, sysconf_names={"SC_PHYS_PAGES": 1}))

    assert read_host_memory(tmp_path) == HostMemory(2**36, 2**36)


def test_the_host_gets_a_quarter_of_the_memory_or_half_of_what_is_available():
    assert default_host_bytes(HostMemory(64 * GIB, 40 * GIB)) == 16 * GIB
    assert default_host_bytes(HostMemory(64 * GIB, 20 * GIB)) == 10 * GIB


def test_this_machine_has_memory():
    found = read_host_memory()

    assert 0 < found.available_bytes <= found.total_bytes
    assert 0 < default_host_bytes() < found.total_bytes


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[Path]:
    """Let every file system have so much room; returns the places that were asked for."""
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=num_bytes)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    return asked


def test_the_disk_gets_a_fifth_of_what_is_free(tmp_path, monkeypatch):
    free(monkeypatch, 100 * GIB)

    assert default_disk_bytes(tmp_path) == 20 * GIB


@pytest.mark.parametrize(("free_gib", "budget_bytes"), [(2.25, GIB // 4), (2, 0), (1, 0)])
def test_a_disk_that_is_nearly_full_keeps_its_last_gibibytes(tmp_path, monkeypatch, free_gib, budget_bytes):
    free(monkeypatch, int(free_gib * GIB))

    assert default_disk_bytes(tmp_path, 2 * GIB) == budget_bytes


def test_what_the_trees_hold_already_counts_as_free(tmp_path, monkeypatch):
    free(monkeypatch, 80 * GIB)

    assert default_disk_bytes(tmp_path, held_bytes=20 * GIB) == 20 * GIB


def test_a_folder_that_is_not_there_yet_is_judged_by_its_nearest_parent(tmp_path, monkeypatch):
    asked = free(monkeypatch, GIB)

    assert free_disk_bytes(tmp_path / "not" / "yet") == GIB
    assert asked == [tmp_path]


def test_a_file_system_that_does_not_answer_is_named(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.disk_usage", refuse)

    with pytest.raises(SettingsError, match=f"{tmp_path}.*Input/output error"):
        free_disk_bytes(tmp_path)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_memory_that_is_not_used_is_given_back() -> None:
    assert trim_heap()
