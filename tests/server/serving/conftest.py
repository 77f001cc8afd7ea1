"""Fake models in a world of their own, and an event loop that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_models import World
from tests.waiting import BOUND_S


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[..., World]:
    return lambda **settings: World(tmp_path, **settings)


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    return lambda work: asyncio.run(asyncio.wait_for(work, BOUND_S))
