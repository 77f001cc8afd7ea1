"""What loading tells the models room about the engine that will be used, and the user about packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from bough.config import Settings
from bough.engines.torch.cpu import route
from bough.engines.torch.cpu.library import load_kernels
from bough.errors import KernelsMissing, SettingsError, UnsupportedModel
from bough.models import GgufSupport, ModelFiles, Store, resolve
from bough.models.aliases import Overlay
from bough.runner import load
from bough.runtime import find_model, gguf_support, loading, make_engine
from tests.models.tiny_gguf import FOR_TORCH, write_gguf
from tests.tiny_models import make_folder


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
    monkeypatch.setattr("bough.runtime.loading.find_installed", lambda: installed)

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


@pytest.fixture
def converted(tmp_path: Path) -> ModelFiles:
    """A model that was converted from a GGUF file which is no longer there."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    model = resolve(file, settings_in(tmp_path), FOR_TORCH)
    file.unlink()
    return model


def settings_in(tmp_path: Path, **settings: Any) -> Settings:
    folders = {"data_folder": tmp_path / "data", "cache_folder": tmp_path / "cache"}
    return Settings(engine="torch", device="cpu", **folders, **settings)


def load_with_advice(model: ModelFiles, tmp_path: Path, **settings: Any) -> list[str]:
    told: list[str] = []
    folders = {"data_folder": tmp_path / "data", "cache_folder": tmp_path / "cache"}
    load(model.name, advise=told.append, engine="torch", device="cpu", disk=0, **folders, **settings).close()
    return told


@pytest.fixture
def has_kernels() -> None:
    try:
        load_kernels()
    except KernelsMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KernelsMissing("there was no C compiler", "install gcc")

    monkeypatch.setattr(route, "load_kernels", fail)
    monkeypatch.setattr(loading, "load_kernels", fail)


def forget_packed(model: ModelFiles) -> None:
    for name in ("model.gguf", "packed.json"):
        (model.folder / name).unlink()


def test_a_model_with_everything_gets_no_advice(converted, tmp_path, has_kernels):
    assert load_with_advice(converted, tmp_path) == []


def test_a_load_tells_once_that_a_model_was_converted_without_packed_weights(converted, tmp_path, has_kernels):
    forget_packed(converted)

    (advice,) = load_with_advice(converted, tmp_path)

    assert advice.startswith(f"{converted.name} was converted by an earlier version of Bough")
    assert load_with_advice(converted, tmp_path, weights="float32") == []  # the user's own choice


def test_a_load_tells_once_that_there_are_no_kernels_and_what_to_do(converted, tmp_path, without_kernels):
    assert load_with_advice(converted, tmp_path) == [
        f"{converted.name} runs in float32 without kernels for this CPU, several times slower than with them "
        "(there was no C compiler): install gcc"
    ]


def test_nobody_to_tell_means_a_warning_in_the_log(converted, tmp_path, without_kernels, caplog):
    folders = {"data_folder": tmp_path / "data", "cache_folder": tmp_path / "cache"}

    load(converted.name, engine="torch", device="cpu", disk=0, **folders).close()

    assert caplog.text.count("several times slower than with them") == 1


@pytest.mark.parametrize("content", ["{", '{"format": 1, "file": "model.gguf"}'])
def test_damaged_packed_weights_are_refused_unless_they_are_not_used(converted, tmp_path, has_kernels, content):
    (converted.folder / "packed.json").write_text(content)

    with pytest.raises(UnsupportedModel, match=r"is damaged: .* with the setting weights=float32 it is not read"):
        make_engine(converted, settings_in(tmp_path))
    for weights in ("float32", "q8_0"):
        make_engine(converted, settings_in(tmp_path, weights=weights)).close()


def test_packed_weights_that_were_not_kept_are_refused_with_what_to_do(converted, tmp_path, has_kernels):
    forget_packed(converted)

    with pytest.raises(SettingsError, match=r"^weights is 'packed', and .* was converted by an earlier .* adds them$"):
        make_engine(converted, settings_in(tmp_path, weights="packed"))


def test_a_load_tells_that_a_model_runs_without_reuse_and_why(tmp_path, caplog):
    folder = make_folder("minimax", tmp_path / "minimax")
    model = ModelFiles(str(folder), folder)

    (told,) = load_with_advice(model, tmp_path)
    assert told.startswith("minimax runs without reuse: every prompt is computed whole, because the model does not run")
    assert load_with_advice(model, tmp_path, cache=False) == []

    load(folder, engine="torch", device="cpu", disk=0, cache_folder=tmp_path / "cache").close()
    assert told in caplog.text


def test_a_load_tells_which_libraries_are_outside_the_tested_range(tmp_path, monkeypatch):
    folder = make_folder("llama", tmp_path / "llama")
    monkeypatch.setattr(loading, "find_untested", lambda *names: [f"{names[1]} 5.99.0 (tested: >=5.17, <5.24)"])

    told = load_with_advice(ModelFiles(str(folder), folder), tmp_path)

    assert told[0].startswith("llama runs on transformers 5.99.0 (tested: >=5.17, <5.24); what the self-check found right")
