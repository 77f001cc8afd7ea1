"""Models from a hub: a small one on the loopback, and clear words when there is no hub."""

from __future__ import annotations

import hashlib
import json
import socket

import huggingface_hub.constants as constants
import pytest

from bough.config import Settings
from bough.errors import DownloadError, ModelNotFound
from bough.models import pull
from bough.models.sources import resolve
from tests.models.packed_model import write_packed_model
from tests.models.tiny_gguf import FOR_TORCH
from tests.models.web_server import Recorder, Site, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}" + b"\0" * 5000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another",
    "tiktoken.model": b"a vocabulary",
    "model-00001-of-00002.safetensors": b"\x02\0\0\0\0\0\0\0{}" + b"\1" * 100,
    "model-00002-of-00002.safetensors": b"\x02\0\0\0\0\0\0\0{}" + b"\2" * 100,
}
USUAL = ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "onnx/model.safetensors")
SHARDS = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def settings(tmp_path):
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


def make_hub(names=USUAL, commit=COMMIT) -> Site:
    siblings = [{"rfilename": name, "size": len(FILES[name])} for name in names]
    for each in siblings:
        if each["rfilename"].endswith(".safetensors"):
            sha256 = hashlib.sha256(FILES[each["rfilename"]]).hexdigest()
            each["lfs"] = {"size": each["size"], "sha256": sha256, "pointerSize": 134}
    tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": f"{i:040x}"} for i, name in enumerate(names)]
    info = {"id": "org/small", "sha": commit, "siblings": siblings}
    info["safetensors"] = {"parameters": {"BF16": 1250}, "total": 1250}
    site = Site(headers={"ETag": '"abc"', "X-Repo-Commit": commit})
    site.files["/api/models/org/small"] = json.dumps(info).encode()
    site.files[f"/api/models/org/small/revision/{commit}"] = json.dumps(info).encode()
    site.files[f"/api/models/org/small/tree/{commit}"] = json.dumps(tree).encode()
    site.types = dict.fromkeys(site.files, "application/json")
    for name in names:
        site.files[f"/org/small/resolve/{commit}/{name}"] = FILES[name]
    return site


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def use_hub(monkeypatch, tmp_path):
    def use(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)

    return use


def test_a_hub_model_is_fetched_without_pickles_and_found_by_its_name(settings, use_hub):
    progress = Recorder()
    with serving(make_hub()) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH, progress)

    assert names_in(files.folder) == ["bough.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert (files.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert (files.sha256, files.num_parameters, files.quantization) == (COMMIT, 1250, "BF16")
    assert resolve("org/small", settings, FOR_TORCH) == files
    assert progress.labels == ["org/small"]
    assert progress.num_finished == 1
    assert progress.done == [sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))]


def test_a_hub_model_that_is_current_is_not_fetched_again(settings, use_hub):
    with serving(make_hub()) as site:
        use_hub(site.url)
        pull("org/small", settings, FOR_TORCH)
        site.asked.clear()
        pull("org/small:latest", settings, FOR_TORCH)

    assert [asked for asked in site.asked if "resolve" in asked] == []


def test_a_pull_that_broke_off_is_taken_up_again_at_the_same_commit(settings, use_hub):
    with serving(make_hub(SHARDS)) as site:
        use_hub(site.url)
        lost = site.files.pop(f"/org/small/resolve/{COMMIT}/{SHARDS[2]}")
        with pytest.raises(DownloadError):
            pull("org/small", settings, FOR_TORCH)
        site.files[f"/org/small/resolve/{COMMIT}/{SHARDS[2]}"] = lost
        site.asked.clear()
        files = pull("org/small", settings, FOR_TORCH)

    assert names_in(files.folder) == ["bough.json", *sorted(SHARDS)]
    assert not [asked for asked in site.asked if asked.startswith("GET") and asked.endswith(SHARDS[1])]


def test_a_pull_that_broke_off_leaves_nothing_to_one_of_another_commit(settings, use_hub):
    with serving(make_hub(SHARDS)) as site:
        use_hub(site.url)
        del site.files[f"/org/small/resolve/{COMMIT}/{SHARDS[2]}"]
        with pytest.raises(DownloadError):
            pull("org/small", settings, FOR_TORCH)
    assert (settings.models_folder / ".making-org--small" / SHARDS[1]).exists()

    with serving(make_hub(commit="f" * 40)) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH)

    assert names_in(files.folder) == ["bough.json", "config.json", "model.safetensors", "tokenizer.json"]


def test_weights_that_the_hub_tells_another_hash_of_are_refused_and_deleted(settings, use_hub):
    damaged = FILES["model.safetensors"][:-1] + b"!"
    with serving(make_hub()) as site:
        use_hub(site.url)
        path = f"/org/small/resolve/{COMMIT}/model.safetensors"
        site.files[path] = damaged
        with pytest.raises(DownloadError, match=r"model\.safetensors of org/small arrived damaged") as caught:
            pull("org/small", settings, FOR_TORCH)

        assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
        assert hashlib.sha256(FILES["model.safetensors"]).hexdigest() in str(caught.value)
        assert not (settings.models_folder / ".making-org--small" / "model.safetensors").exists()
        site.files[path] = FILES["model.safetensors"]
        files = pull("org/small", settings, FOR_TORCH)

    assert (files.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_tiktoken_vocabulary_is_fetched(settings, use_hub):
    with serving(make_hub(("config.json", "model.safetensors", "tiktoken.model"))) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH)

    assert files.has_tokenizer
    assert (files.folder / "tiktoken.model").read_bytes() == FILES["tiktoken.model"]


def test_a_hub_model_with_pickles_alone_is_refused(settings, use_hub):
    with serving(make_hub(("config.json", "pytorch_model.bin"))) as site:
        use_hub(site.url)
        with pytest.raises(ModelNotFound, match="no safetensors weights among its 2 files"):
            pull("org/small", settings, FOR_TORCH)


def test_a_model_that_the_hub_does_not_have_is_not_found(settings, use_hub):
    with serving(make_hub()) as site:
        site.headers["X-Error-Code"] = "RepoNotFound"
        use_hub(site.url)
        with pytest.raises(ModelNotFound, match="the hub has no model 'org/none'"):
            pull("org/none", settings, FOR_TORCH)


def test_a_hub_that_cannot_be_reached_is_told_as_such(settings, use_hub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    use_hub(f"http://127.0.0.1:{port}")

    with pytest.raises(DownloadError, match=r"cannot fetch org/small from the hub.*is there a network\?"):
        pull("org/small", settings, FOR_TORCH)


def test_offline_mode_is_told_as_such(settings, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(DownloadError, match=r"cannot fetch org/small.*(?i:offline)"):
        pull("org/small", settings, FOR_TORCH)


def test_a_model_of_mlx_community_comes_whole_and_is_counted_as_what_it_stands_for(
    settings, use_hub, tmp_path, monkeypatch
):
    write_packed_model(tmp_path / "packed")
    held = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    small = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json")
    held |= dict.fromkeys(small, b"{}") | {"chat_template.jinja": b"{{ messages }}", "README.md": b"a card"}
    for name, content in held.items():
        monkeypatch.setitem(FILES, name, content)

    with serving(make_hub(tuple(held))) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH)

    assert names_in(files.folder) == sorted([*(name for name in held if name != "README.md"), "bough.json"])
    assert files.num_parameters == 64 * 128 + 32 * 64 + 32 + 128  # the hub told 1,250
    assert files.quantization == "4-bit"
