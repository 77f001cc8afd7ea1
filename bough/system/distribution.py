"""Bough's own distribution: its name and version, the versions of libraries it was tested with, and others called `bough`.

The distribution is `bough-llm`; the import and the command are `bough`. The package index has another program called
`bough`, which installs into the same folder and under the same command. So every command that a message suggests names the
distribution, and `find_strangers` looks for the other one. `VERSION` is that of the code that runs, whatever is
installed; pyproject.toml takes it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "bough-llm"
VERSION = "0.1.0"
_STRANGER = "bough"

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "server": ("fastapi", "fastapi_offline", "prometheus_client", "starlette", "uvicorn"),
    "bench": ("matplotlib",),
    "store": ("obstore",),
}
"""The packages that each extra brings, apart from the engines', by the names that are imported."""


def install_command(extra: str) -> str:
    """The command that installs an extra, such as an engine."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def find_missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed. Imports none of them."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]


def reinstall_command(*flags: str) -> str:
    """The command that installs Bough again: this source folder if it is one, else the package with these flags."""
    source = Path(__file__).parents[2]
    if (source / "setup.py").exists():
        return f"pip install --no-deps -e {source}"
    return " ".join(["pip install --force-reinstall --no-deps", *flags, DISTRIBUTION])


def repair_command() -> str:
    """The command that removes the distribution `bough`, and puts back the files of ours that are removed with it."""
    return f"pip uninstall {_STRANGER} && {reinstall_command()}"


def find_strangers() -> list[str]:
    """The installed distributions called `bough`, each as a sentence. Lists each folder of the path once: milliseconds."""
    return [
        f"the distribution {_STRANGER} {each.version} is somebody else's, in the same folder; Bough is {DISTRIBUTION}"
        for each in distributions(name=_STRANGER)
        if each.read_text("RECORD") is not None  # else it is an *.egg-info that a build left in a clone
    ]


def find_untested(*libraries: str) -> list[str]:
    """Those of these installed libraries whose version is outside the range that Bough requires, each as text.

    A source folder that is not installed has no metadata, and so no ranges: nothing is found.
    """
    from packaging.requirements import Requirement  # takes 50 ms, and most commands do not load a model

    try:
        required = [Requirement(each) for each in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []
    untested = {
        each.name: each.specifier
        for each in required
        if each.name in libraries and not each.specifier.contains(version(each.name), prereleases=True)
    }
    tested = {name: ", ".join(sorted(str(specifier).split(","), reverse=True)) for name, specifier in untested.items()}
    return [f"{name} {version(name)} (tested: {ranges})" for name, ranges in tested.items()]
