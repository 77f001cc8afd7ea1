"""What a runner tells the models room about the engine that will be used."""

from __future__ import annotations

import pytest

from bough.config import Settings
from bough.models import GgufSupport, Store
from bough.models.aliases import Overlay
from bough.runner import find_model, gguf_support


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


def test_a_created_model_says_that_its_overlay_is_for_servers(tmp_path, caplog):
    settings = Settings(data_folder=tmp_path)
    store = Store(settings.models_folder)
    with store.making("small") as making:
        (making.folder / "config.json").write_text("{}")
        making.commit("a test", "", 0, "")
    store.copy("small", "plain")
    store.add_alias("made", "small", Overlay(system="Be brief."))

    assert find_model("plain", settings).name == "small" and not caplog.text
    assert find_model("made", settings).name == "small"
    assert "made runs as small: only a server uses its own system prompt" in caplog.text
