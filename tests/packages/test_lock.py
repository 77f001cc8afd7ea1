"""The lock and the lists of requirements that `make` installs from, beside the ranges in pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
RANGES = [
    found
    for texts in (
        PROJECT["dependencies"],
        PYPROJECT["build-system"]["requires"],
        *PROJECT["optional-dependencies"].values(),
    )
    for found in map(Requirement, texts)
    if found.name != PROJECT["name"] and (found.marker is None or found.marker.evaluate({"sys_platform": "linux"}))
]


def read_lock() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def requirements(which: str) -> dict[str, str]:
    """What `make newest` or `make oldest` installs: the versions of each name."""
    command = [sys.executable, "packaging/library_versions.py", which]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {canonicalize_name(found.name): str(found.specifier) for found in map(Requirement, lines)}


@pytest.mark.parametrize("wanted", RANGES, ids=str)
def test_the_lock_has_a_version_within_each_range(wanted: Requirement) -> None:
    assert Version(read_lock()[canonicalize_name(wanted.name)]) in wanted.specifier, "run: make lock"


def test_the_lock_has_versions_alone_without_builds_or_places() -> None:
    assert all(re.fullmatch(r"[\w.-]+", text) for entry in read_lock().items() for text in entry)


def test_the_newest_libraries_have_no_upper_bound_but_torch_has() -> None:
    found = requirements("newest")

    assert [found[name] for name in ("transformers", "mlx-lm", "ray")] == [">=5.18", ">=0.32", ">=2.60"]
    assert "<2.14" in found["torch"] and "pytest" in found


def test_the_oldest_versions_are_the_lower_bounds_of_what_users_install() -> None:
    found = requirements("oldest")

    lowest = {name: text for name, text in found.items() if text.startswith("==")}
    assert (lowest["transformers"], lowest["torch"]) == ("==5.17", "==2.11")
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} <= set(lowest)
    assert found["pytest"].startswith(">=")
