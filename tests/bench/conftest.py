"""Two variants of a model over fake engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.bench.variants import Variant
from bough.cache.tree.state import Group
from tests.cli.conftest import make_runner
from tests.fakes import FakeEngine

PROMPT = [3, 1, 4, 1, 5]


class ShiftedEngine(FakeEngine):
    """Logits that are a little off, and prefer another token at every tenth position."""

    def _logits(self, held: dict[Group, tuple[int, list[int]]]) -> tuple[float, ...]:
        best, *rest = super()._logits(held)
        first, tokens = next(iter(held.values()))
        return (100.0 if (first + len(tokens)) % 10 == 0 else best, *(each + 1e-3 for each in rest))


@pytest.fixture
def variants(tmp_path: Path) -> Iterator[list[Variant]]:
    with (
        make_runner(tmp_path / "one") as one,
        make_runner(tmp_path / "two", ShiftedEngine(vocab_size=one.runtime.engine.vocab_size)) as two,
    ):
        yield [Variant("float32", one.runtime), Variant("auto", two.runtime)]
