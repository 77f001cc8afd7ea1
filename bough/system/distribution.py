"""What Bough is called on the package index, its version, and other distributions called `bough` in this environment.

The distribution is `bough-llm`; the import and the command are `bough`. On the package index `bough` is a program of
somebody else, which installs into the same folder and under the same command. So every command that we tell people to type
names the distribution, and `find_wrong_distributions` looks for the other one. `VERSION` is that of the code that runs,
whatever is installed; pyproject.toml takes it from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

DISTRIBUTION = "bough-llm"
VERSION = "0.1.0"
_OLD_NAME = "bough"
_ENTRY_POINT = "bough.cli.main:main"


@dataclass(frozen=True)
class WrongDistribution:
    """A distribution called `bough` that is installed here: somebody else's, or ours of before the new name."""

    version: str
    is_ours: bool

    def __str__(self) -> str:
        if self.is_ours:
            return f"the distribution bough {self.version} is Bough under its old name, and is now called {DISTRIBUTION}"
        return f"the distribution bough {self.version} is somebody else's, in the same folder; Bough is {DISTRIBUTION}"


def install_command(extra: str) -> str:
    """What to type to install an extra, such as an engine."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def reinstall_command(*flags: str) -> str:
    """What to type to install Bough again: the source folder that this is, as it is, or the package with these flags."""
    source = Path(__file__).parents[2]
    if (source / "setup.py").exists():
        return f"pip install --no-deps -e {source}"
    return " ".join(["pip install --force-reinstall --no-deps", *flags, DISTRIBUTION])


def repair_command() -> str:
    """What to type to remove what is called `bough`, and to put back the files of ours that went with it."""
    return f"pip uninstall {_OLD_NAME} && {reinstall_command()}"


def find_wrong_distributions() -> list[WrongDistribution]:
    """The installed distributions called `bough`. It lists each folder of the path once, which takes milliseconds."""
    installed = (each for each in distributions(name=_OLD_NAME) if _was_installed(each))
    return [WrongDistribution(each.version, is_ours=_is_ours(each)) for each in installed]


def _was_installed(distribution: Distribution) -> bool:
    """Whether an installer wrote it. The folder *.egg-info that a build leaves in a clone has no record of files."""
    return distribution.read_text("RECORD") is not None


def _is_ours(distribution: Distribution) -> bool:
    return any(each.value == _ENTRY_POINT for each in distribution.entry_points)
