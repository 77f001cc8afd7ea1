"""Bough without what only POSIX has: it can be imported, and its disk tier works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """What a task of `tests.without_posix` prints; it must not fail."""
    command = [sys.executable, "-m", "tests.without_posix", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_can_be_imported() -> None:
    assert run("import") == ""


def test_a_folder_has_one_owner_among_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.without_posix", "hold", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert run("take", str(tmp_path)) == f"process {other.pid} has it\n"
        other.kill()
    assert run("take", str(tmp_path)) == "taken\n"
    assert list(tmp_path.iterdir()) == []


def test_the_disk_tier_passes_some_of_its_tests() -> None:
    some = "can_be_got or restart_finds_equal or closing_saves or copy_goes or has_one_owner_in"
    output = run("test", "tests/cache/disk/test_disk.py", "tests/cache/disk/test_opening.py", "-k", some)
    assert "5 passed" in output
