"""Which trees are crashed: every kind of model once, more of them with `--slow`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import MODELS


def how_often(request: pytest.FixtureRequest, count: int) -> int:
    """So often with --slow, half as often without."""
    return count if request.config.getoption("--slow") else count // 2


def seeds(count: int) -> list[Any]:
    """Seeds for a test; those beyond one for each kind of model are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= len(MODELS) else []) for seed in range(count)]
