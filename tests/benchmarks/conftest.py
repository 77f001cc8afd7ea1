"""The commands of the benchmarks in this process, with a home of their own; and two variants of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from tests.bench.conftest import variants
from tests.cli.conftest import Invoke, home

__all__ = ["home", "variants"]


@pytest.fixture
def invoke(home: Path) -> Invoke:
    return lambda *words, **options: CliRunner().invoke(app, list(words), **options)
