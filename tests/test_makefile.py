"""What the Makefile names is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["check", "test-ray"])
def test_the_tests_that_a_target_runs_exist(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)

    named = [
        word for line in done.stdout.splitlines() if "pytest" in line for word in line.split() if word.startswith("tests/")
    ]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
