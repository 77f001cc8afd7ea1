"""How much memory weights are estimated to take."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from bough.config import Settings
from bough.errors import KernelsMissing
from bough.models import ModelFiles, resolve
from bough.runtime import loading, weights_bytes
from tests.models.tiny_gguf import FOR_TORCH, write_gguf
from tests.tiny_models import make_folder


def prepare(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> tuple[ModelFiles, Settings]:
    settings = Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")
    write_gguf(tmp_path / "tiny.gguf", kind)
    return resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH), settings


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_kernels", lambda: None)


def test_blocks_that_the_kernels_know_keep_their_size(tmp_path):
    files, settings = prepare(tmp_path, gguf.GGMLQuantizationType.Q8_0)

    found = weights_bytes(files, settings, is_on_cpu=True)

    assert 0.5 * files.size_bytes < found <= files.size_bytes


@pytest.mark.parametrize(("weights", "is_on_cpu", "number_bytes"), [("float32", True, 4), ("auto", False, 2)])
def test_blocks_that_are_unpacked_take_a_float_a_number(tmp_path, weights, is_on_cpu, number_bytes):
    files, settings = prepare(tmp_path, gguf.GGMLQuantizationType.Q8_0)

    packed = weights_bytes(files, settings, is_on_cpu=True)
    found = weights_bytes(files, Settings(weights=weights), is_on_cpu)

    assert found == pytest.approx(packed * number_bytes * 32 / 34)


def test_without_kernels_blocks_become_float32(tmp_path, monkeypatch):
    files, settings = prepare(tmp_path, gguf.GGMLQuantizationType.Q4_0)
    packed = weights_bytes(files, settings, is_on_cpu=True)

    def refuse() -> None:
        raise KernelsMissing("there is no compiler", "")

    monkeypatch.setattr(loading, "load_kernels", refuse)

    assert weights_bytes(files, settings, is_on_cpu=True) == pytest.approx(packed * 4 * 32 / 18)


def test_half_precision_doubles_on_a_cpu_only_where_it_becomes_float32(tmp_path):
    folder = make_folder("llama", tmp_path / "half")
    files = ModelFiles("half", folder)
    files.config["dtype"] = "bfloat16"
    size = sum(file.stat().st_size for file in files.weights)

    assert weights_bytes(files, Settings(), is_on_cpu=True) == size
    assert weights_bytes(files, Settings(weights="float32"), is_on_cpu=True) == 2 * size
    assert weights_bytes(files, Settings(weights="float32"), is_on_cpu=False) == size
