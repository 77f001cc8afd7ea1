"""What is in the wheel and in the sdist, and what their metadata say."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from bough.system.distribution import VERSION

pytestmark = pytest.mark.package

ROOT = Path(__file__).parents[2]
KERNELS = "bough/engines/torch/cpu/_kernels.so"
SOURCES = "bough/engines/torch/cpu/kernels"


def tracked(*paths: str) -> set[str]:
    """The files of the repository below these paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as content:
        assert content.testzip() is None
        return set(content.namelist())


@pytest.fixture(scope="module")
def in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as content:
        return {each.name.partition("/")[2] for each in content.getmembers() if each.isfile()}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_string(content.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_the_built_kernels(in_wheel: set[str]) -> None:
    package = {each for each in in_wheel if ".dist-info/" not in each}
    assert package == tracked("bough") - tracked(SOURCES) | {KERNELS}
    assert any(each.startswith("bough/server/web/") for each in package)


def test_the_wheel_serves_every_python_on_one_platform(wheel: Path) -> None:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none") and platform != "any"


def test_the_sdist_has_what_the_wheel_is_built_from_and_no_tests(in_sdist: set[str]) -> None:
    assert tracked("bough") | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= in_sdist
    assert KERNELS not in in_sdist
    assert not [each for each in in_sdist if each.startswith(("tests/", "docs/", "build/", "benchmarks/"))]


def test_the_metadata_are_those_of_the_project(metadata: email.message.Message) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (metadata["Name"], metadata["Version"]) == (project["name"], VERSION)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])


def test_an_index_would_take_both(wheel: Path, sdist: Path) -> None:
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
