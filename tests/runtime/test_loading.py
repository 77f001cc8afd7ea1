"""What loading tells the models room about the engine that will be used, and the user about faster ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from bough.config import Settings
from bough.engines.torch.cpu import route
from bough.engines.torch.cpu.library import load_kernels
from bough.errors import KernelsMissing, SettingsError, UnsupportedModel
from bough.models import GgufSupport, ModelFiles, ModelFolder, resolve
from bough.models.aliases import Overlay
from bough.runner import load
from bough.runtime import find_model, gguf_support, loading, make_engine
from tests.models.tiny_gguf import FOR_TORCH, write_gguf
from tests.tiny_models import make_folder


@pytest.mark.parametrize(
    ("engine", "installed", "found"),
    [
        ("torch", {"torch", "mlx"}, GgufSupport(is_readable=False, is_convertible=True, is_preferred=True)),
        ("mlx", {"torch", "mlx"}, GgufSupport(is_readable=True, is_convertible=True)),
        ("mlx", {"mlx"}, GgufSupport(is_readable=True, is_convertible=False)),
    ],
)
def test_mlx_reads_gguf_files_and_torch_converts_them(
    engine: str, installed: set[str], found: GgufSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_kernels", lambda: "kernels")
    monkeypatch.setattr("bough.engines.choice.find_installed", lambda: installed)
    monkeypatch.setattr("bough.runtime.loading.find_installed", lambda: installed)

    assert gguf_support(Settings(engine=engine, device="cpu")) == found


@pytest.mark.parametrize(
    "settings",
    [Settings(device="cuda"), Settings(device="cpu", weights="float32"), Settings(device="cpu", dtype="bfloat16")],
)
def test_a_quantized_file_is_not_preferred_where_its_weights_would_be_unpacked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_kernels", lambda: "kernels")

    assert not gguf_support(settings).is_preferred


def test_a_quantized_file_is_not_preferred_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KernelsMissing("there are none for this CPU", "")

    monkeypatch.setattr(loading, "load_kernels", fail)

    assert not gguf_support(Settings(engine="torch", device="cpu")).is_preferred


def test_without_the_engine_the_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.engines.choice.find_installed", set)

    support = gguf_support(Settings(engine="mlx"))

    assert not support.is_readable and not support.is_convertible
    assert "the engine mlx is not installed" in support.problem


def test_a_created_model_says_that_its_overlay_is_for_servers(tmp_path, caplog):
    settings = Settings(data_folder=tmp_path)
    store = ModelFolder(settings.models_folder)
    with store.making("small") as making:
        (making.folder / "config.json").write_text("{}")
        making.commit("a test", "", 0, "")
    store.copy("small", "plain")
    store.add_alias("made", "small", Overlay(system="Be brief."))

    assert find_model("plain", settings).name == "small" and not caplog.text
    assert find_model("made", settings).name == "small"
    assert "made runs as small: only a server uses its own system prompt" in caplog.text


@pytest.fixture
def prepared(tmp_path: Path) -> ModelFiles:
    """A model that is a GGUF file."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    return resolve(file, settings_in(tmp_path), FOR_TORCH)


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


def test_a_model_with_everything_gets_no_advice(prepared, tmp_path, has_kernels):
    assert load_with_advice(prepared, tmp_path) == []


def test_a_load_tells_once_that_there_are_no_kernels_and_what_to_do(prepared, tmp_path, without_kernels):
    assert load_with_advice(prepared, tmp_path) == [
        f"{prepared.name} runs in float32 without kernels for this CPU, several times slower than with them "
        "(there was no C compiler): install gcc"
    ]


def test_nobody_to_tell_means_a_warning_in_the_log(prepared, tmp_path, without_kernels, caplog):
    folders = {"data_folder": tmp_path / "data", "cache_folder": tmp_path / "cache"}

    load(prepared.name, engine="torch", device="cpu", disk=0, **folders).close()

    assert caplog.text.count("several times slower than with them") == 1


def test_a_context_that_the_model_does_not_have_is_refused_before_an_engine_is_imported(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_import_engine", lambda settings: pytest.fail("an engine was imported"))

    with pytest.raises(SettingsError, match="context is 999999, and the model holds"):
        make_engine(ModelFiles(prepared.name, prepared.folder), replace(settings_in(tmp_path), context=999_999))


@pytest.mark.parametrize("content", ["{", '{"format": 2, "files": [1]}'])
def test_a_damaged_table_is_refused_in_one_line(prepared, tmp_path, content):
    (prepared.folder / "packed.json").write_text(content)

    with pytest.raises(UnsupportedModel, match=r"packed\.json|no safetensors weights") as caught:
        make_engine(ModelFiles(prepared.name, prepared.folder), settings_in(tmp_path))

    assert "\n" not in str(caught.value)


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


def test_a_gguf_file_that_is_replaced_while_it_is_read_is_refused(
    prepared: ModelFiles, tmp_path: Path, monkeypatch
) -> None:
    from bough.engines.torch import TorchEngine

    load_engine = TorchEngine.load

    def replace_and_load(*given: Any) -> TorchEngine:
        engine = load_engine(*given)
        write_gguf(prepared.weights[0], gguf.GGMLQuantizationType.Q8_0, scale=0.5)
        return engine

    monkeypatch.setattr(TorchEngine, "load", staticmethod(replace_and_load))

    with pytest.raises(UnsupportedModel, match="differs from the file that tiny-"):
        make_engine(prepared, settings_in(tmp_path))
