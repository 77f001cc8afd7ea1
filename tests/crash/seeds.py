"""Which trees are crashed: every kind of model once, more of them with `--slow`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import MODELS


def seeds(count: int) -> list[Any]:
    """Seeds for a test; those beyond one for each kind of model are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= len(MODELS) else []) for seed in range(count)]
