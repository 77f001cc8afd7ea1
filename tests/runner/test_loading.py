"""What a runner tells the models room about the engine that will be used."""

from __future__ import annotations

import pytest

from bough.config import Settings
from bough.models import GgufSupport
from bough.runner import gguf_support


@pytest.mark.parametrize(
    ("engine", "installed", "found"),
    [
        ("torch", {"torch", "mlx"}, GgufSupport(is_readable=False, is_convertible=True)),
        ("mlx", {"torch", "mlx"}, GgufSupport(is_readable=True, is_convertible=True)),
        ("mlx", {"mlx"}, GgufSupport(is_readable=True, is_convertible=False)),
    ],
)
def test_mlx_reads_gguf_files_and_torch_converts_them(
    engine: str, installed: set[str], found: GgufSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.engines.choice.find_installed", lambda: installed)
    monkeypatch.setattr("bough.runner.loading.find_installed", lambda: installed)

    assert gguf_support(Settings(engine=engine)) == found


def test_without_the_engine_the_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.engines.choice.find_installed", set)

    support = gguf_support(Settings(engine="mlx"))

    assert not support.is_readable and not support.is_convertible
    assert "the engine mlx is not installed" in support.problem
