"""The name of the distribution: what we tell people to install, and other distributions called `bough`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bough.system import distribution
from bough.system.distribution import (
    find_strangers,
    find_untested,
    install_command,
    repair_command,
)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = "|".join(PROJECT["optional-dependencies"])
TOLD_TO_INSTALL = re.compile(rf"\bbough\\?\[(?:\{{|{EXTRAS})|(?<!un)install (?:-\S+ )*['\"`]?bough(?![-\w/.])")
"""Commands and requirements that would bring somebody else's package."""


def install(site: Path, entry_point: str, *, with_record: bool = True) -> None:
    """Write what pip writes for a distribution called `bough`."""
    folder = site / "bough-0.3.4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bough\nVersion: 0.3.4\n")
    (folder / "entry_points.txt").write_text(f"[console_scripts]\nbough = {entry_point}\n")
    if with_record:
        (folder / "RECORD").write_text("bough/__init__.py,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which packages are found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_nothing_in_the_repository_tells_people_to_install_the_package_of_somebody_else() -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file() and (ROOT / name) != Path(__file__)]
    texts = {file: file.read_bytes().decode("utf-8", errors="ignore") for file in files}

    found = {f"{file.relative_to(ROOT)}: {each}" for file, text in texts.items() for each in TOLD_TO_INSTALL.findall(text)}

    assert len(texts) > 500 and found == set()


@pytest.mark.parametrize(
    "text", ["pip install 'bough[torch]'", r"match=r'bough\[mlx\]'", "f'bough[{extra}]'", "install -q bough"]
)
def test_the_search_finds_such_commands(text: str) -> None:
    assert TOLD_TO_INSTALL.search(text)


def test_commands_name_the_distribution_of_the_project() -> None:
    assert install_command("torch") == f"pip install '{PROJECT['name']}[torch]'"


def test_a_distribution_of_somebody_else_is_found(site: Path) -> None:
    install(site, "bough.cli:main")

    (found,) = find_strangers()

    assert found.startswith("the distribution bough 0.3.4 is somebody else's")


def test_what_a_build_leaves_in_a_clone_is_no_installation(site: Path) -> None:
    install(site, "bough.cli.main:main", with_record=False)

    assert find_strangers() == []


def test_a_clone_and_a_package_are_mended_by_different_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair_command() == f"pip uninstall bough && pip install --no-deps -e {ROOT}"

    monkeypatch.setattr(distribution, "__file__", str(tmp_path / "bough" / "system" / "distribution.py"))

    assert repair_command() == "pip uninstall bough && pip install --force-reinstall --no-deps bough-llm"


def pretend(monkeypatch: pytest.MonkeyPatch, installed: str, *required: str) -> None:
    monkeypatch.setattr(distribution, "requires", lambda name: list(required))
    monkeypatch.setattr(distribution, "version", lambda name: installed)


def test_the_libraries_of_this_environment_are_known() -> None:
    assert len(distribution.requires("bough-llm") or ()) > 10


@pytest.mark.parametrize("installed", ["5.17.0", "5.23.9", "5.23.0.dev0"])
def test_a_tested_version_is_not_named(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed, "transformers>=5.17,<5.24", "torch>=2.11; extra == 'torch'")
    assert find_untested("transformers") == []


@pytest.mark.parametrize("installed", ["5.24.0", "5.16.2", "6.0.0rc1"])
def test_a_version_outside_is_named_with_the_range(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed, "transformers>=5.17,<5.24; extra == 'torch'")
    assert find_untested("transformers", "rich") == [f"transformers {installed} (tested: >=5.17, <5.24)"]


def test_a_bare_source_folder_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "DISTRIBUTION", "no-such-distribution")
    assert find_untested("transformers") == []
