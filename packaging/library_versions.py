"""Prints versions of libraries that pip cannot derive from pyproject.toml itself. One command each:

- `newest`: the ranges, without the upper bounds of libraries that we want to try before users get them;
- `oldest`: the lowest version of each range, for what users install; what only developers need keeps its range;
- `lock REPORT`: exact versions from a report of `pip install --dry-run --report`, as constraints.

Run it by a Python that has `packaging`, such as that of an environment made by `make`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
USED = ("torch", "mlx", "server", "store")
"""The extras whose code the tests of `make newest` and `make oldest` run."""
LIFTED = ("transformers", "mlx", "mlx-lm", "ray")
HEADER = """\
# Exact versions for `make` and CI, written by `make lock`: do not edit. Users get the ranges of pyproject.toml.
# Resolved on Linux, x86-64, Python 3.11. It serves others, too: what is not installed there is not constrained, and what
# only they install is not pinned.
"""


def read_requirements(*extras: str) -> Iterator[Requirement]:
    """What these extras require themselves, without the extras that they name; without any, what the project requires."""
    optional = PROJECT["optional-dependencies"]
    for text in [*(PROJECT["dependencies"] if not extras else ()), *(each for name in extras for each in optional[name])]:
        found = Requirement(text)
        if canonicalize_name(found.name) != PROJECT["name"]:
            yield found


def lift_upper_bounds(requirement: Requirement) -> Requirement:
    if canonicalize_name(requirement.name) in LIFTED:
        requirement.specifier = SpecifierSet(",".join(str(each) for each in requirement.specifier if each.operator != "<"))
    return requirement


def take_lowest(requirement: Requirement) -> Requirement:
    (lowest,) = (each.version for each in requirement.specifier if each.operator == ">=")
    requirement.specifier = SpecifierSet(f"=={lowest}")
    return requirement


def write_newest() -> Iterator[str]:
    for each in (*read_requirements(), *read_requirements(*USED, "ray", "dev")):
        yield str(lift_upper_bounds(each))


def write_oldest() -> Iterator[str]:
    """An extra that needs more than the project itself is not heeded: the project's own bound is the lowest."""
    own = {each.name: each for each in read_requirements()}
    for each in (*own.values(), *(each for each in read_requirements(*USED) if each.name not in own)):
        yield str(take_lowest(each))
    yield from map(str, read_requirements("dev"))


def write_lock(report: Path) -> Iterator[str]:
    """The versions without tags of builds: `torch==2.13.0` is met by a build for CPUs and by one for CUDA."""
    yield HEADER.strip()
    found = (each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"])
    pins = {canonicalize_name(each["name"]): Version(each["version"]).public for each in found}
    yield from (f"{name}=={pins[name]}" for name in sorted(pins) if name != PROJECT["name"])


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    commands = {"newest": write_newest, "oldest": write_oldest, "lock": lambda: write_lock(Path(arguments[0]))}
    print("\n".join(commands[command]()))
