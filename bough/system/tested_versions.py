"""Which versions of libraries Bough was tested with: the ranges that its own distribution requires."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from bough.system.distribution import DISTRIBUTION


def find_untested(*libraries: str) -> list[str]:
    """Those of these installed libraries whose version lies outside the tested range, each in words.

    Without metadata of our own, as in a source folder that is not installed, there are no ranges, and nothing is found.
    """
    try:
        required = [Requirement(each) for each in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []
    ranges = {each.name: each.specifier for each in required if each.name in libraries}
    found = {name: version(name) for name in ranges}
    return [
        f"{name} {found[name]} (tested: {_in_words(str(tested))})"
        for name, tested in ranges.items()
        if not tested.contains(found[name], prereleases=True)
    ]


def _in_words(specifier: str) -> str:
    return ", ".join(sorted(specifier.split(","), reverse=True))
