"""What `make package` has built."""

from __future__ import annotations

from pathlib import Path

import pytest


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    assert len(found) == 1, f"there should be one {pattern} in {folder}, not {[each.name for each in found]}"
    return found[0]


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    return only(Path(request.config.getoption("--packages")).resolve(), "bough_llm-*.whl")


@pytest.fixture(scope="session")
def sdist(request: pytest.FixtureRequest) -> Path:
    return only(Path(request.config.getoption("--packages")).resolve(), "bough_llm-*.tar.gz")
