"""Both kinds of lanes for the scenarios that are played on the fake engine alone."""

from __future__ import annotations

import math

import pytest

from bough.cache.residency import loading
from tests.scenarios.world import World


@pytest.fixture(params=[False, True], ids=["copies", "shares"])
def lane_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Play a scenario twice: with lanes that copy rows, and with lanes that share them with the tree."""
    is_pooled = bool(request.param)
    monkeypatch.setattr(World, "is_pooled", is_pooled)
    return is_pooled


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look takes all that has arrived from the disk or the store, however slowly this machine runs."""
    monkeypatch.setattr(loading, "TAKE_S", math.inf)
