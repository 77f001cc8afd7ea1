"""Models from a hub: a small one on the loopback, and clear words when there is no hub."""

from __future__ import annotations

import hashlib
import json
import socket
from dataclasses import replace
from types import SimpleNamespace

import gguf
import huggingface_hub.constants as constants
import pytest

from bough.config import Settings
from bough.errors import DownloadError, ModelNotFound, UnsupportedModel
from bough.models import GgufSupport, ModelFolder, pull
from bough.models.sources import resolve
from tests.models.packed_model import write_packed_model
from tests.models.tiny_gguf import FOR_MLX, FOR_TORCH, split_gguf, write_gguf
from tests.models.web_server import Recorder, Site, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights(num_bytes: int, content: bytes) -> bytes:
    """A safetensors file with one weight."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + content * num_bytes


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": weights(5000, b"\0"),
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another",
    "tiktoken.model": b"a vocabulary",
    "modules.json": b"[]",
    "sentence_bert_config.json": b"{}",
    "config_sentence_transformers.json": b"{}",
    "1_Pooling/config.json": b'{"pooling_mode": "cls"}',
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": weights(10, b"\3"),
    "2_Dense/pytorch_model.bin": b"another pickle",
    "openvino/config.json": b"{}",
    "model-00001-of-00002.safetensors": weights(100, b"\1"),
    "model-00002-of-00002.safetensors": weights(100, b"\2"),
}
USUAL = ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "onnx/model.safetensors")
SHARDS = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def settings(tmp_path):
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


ENCODER = (
    *USUAL,
    *(name for name in FILES if name.startswith(("modules", "sentence_", "config_s", "1_", "2_", "openvino"))),
)


def make_hub(names=USUAL, commit=COMMIT, repository="org/small") -> Site:
    siblings = [{"rfilename": name, "size": len(FILES[name])} for name in names]
    for each in siblings:
        if each["rfilename"].endswith((".safetensors", ".gguf")):
            sha256 = hashlib.sha256(FILES[each["rfilename"]]).hexdigest()
            each["lfs"] = {"size": each["size"], "sha256": sha256, "pointerSize": 134}
    tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": f"{i:040x}"} for i, name in enumerate(names)]
    info = {"id": repository, "sha": commit, "siblings": siblings}
    info |= {"safetensors": {"parameters": {"BF16": 1250}, "total": 1250}, "cardData": {"license": "apache-2.0"}}
    site = Site(headers={"ETag": '"abc"', "X-Repo-Commit": commit})
    site.files[f"/api/models/{repository}"] = json.dumps(info).encode()
    site.files[f"/api/models/{repository}/revision/{commit}"] = json.dumps(info).encode()
    site.files[f"/api/models/{repository}/tree/{commit}"] = json.dumps(tree).encode()
    site.types = dict.fromkeys(site.files, "application/json")
    for name in names:
        site.files[f"/{repository}/resolve/{commit}/{name}"] = FILES[name]
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
    plan, label = progress.labels
    size = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert plan.startswith("org/small from org/small: 5.1 kB; licence apache-2.0; ") and plan.endswith(" free on the disk")
    assert label == "org/small"
    assert progress.totals == [None, size]
    assert progress.done == [0, size]


def test_an_encoder_is_fetched_with_the_steps_behind_it(settings, use_hub):
    with serving(make_hub(ENCODER)) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH)

    fetched = {file.relative_to(files.folder).as_posix() for file in files.folder.rglob("*") if file.is_file()}
    usual = {"bough.json", "config.json", "model.safetensors", "tokenizer.json"}
    small = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"}
    assert fetched == usual | small | {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert (files.folder / "2_Dense" / "model.safetensors").read_bytes() == FILES["2_Dense/model.safetensors"]


def test_a_model_whose_steps_alone_have_safetensors_is_refused(settings, use_hub):
    names = ("config.json", "pytorch_model.bin", "modules.json", "2_Dense/model.safetensors")
    with serving(make_hub(names)) as site:
        use_hub(site.url)
        with pytest.raises(ModelNotFound, match="no safetensors weights among its 4 files"):
            pull("org/small", settings, FOR_TORCH)


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


def test_a_short_name_is_fetched_from_its_repository_and_kept_under_the_name_that_was_typed(settings, use_hub):
    plans = []
    with serving(make_hub(repository="Qwen/Qwen3-4B")) as site:
        use_hub(site.url)
        files = pull("qwen3:4b", settings, FOR_TORCH, announce=plans.append)
        site.asked.clear()
        usual = pull("qwen3", settings, FOR_TORCH, announce=plans.append)

    assert (files.name, files.source, files.sha256) == ("qwen3:4b", "hub: Qwen/Qwen3-4B", COMMIT)
    assert usual == files and ModelFolder(settings.models_folder).resolve("qwen3") == files
    assert [asked for asked in site.asked if "resolve" in asked] == []  # the same content is here
    (plan,) = plans
    assert (plan.name, plan.source, plan.license) == ("qwen3:4b", "Qwen/Qwen3-4B", "apache-2.0")
    assert plan.download_bytes == sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))


def test_a_plan_that_is_refused_fetches_nothing(settings, use_hub):
    def refuse(plan):
        raise DownloadError("no, thanks")

    with serving(make_hub()) as site:
        use_hub(site.url)
        with pytest.raises(DownloadError, match="no, thanks"):
            pull("org/small", settings, FOR_TORCH, announce=refuse)

    assert [asked for asked in site.asked if "resolve" in asked] == []
    assert [path.name for path in settings.models_folder.iterdir()] == [".lock-org--small"]


def test_a_disk_without_room_is_told_with_the_numbers_before_the_download(settings, use_hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))

    with serving(make_hub()) as site:
        use_hub(site.url)
        with pytest.raises(
            DownloadError, match=r"org/small from org/small needs 5,[0-9]+ bytes in .*models, .* 1,000 bytes free"
        ):
            pull("org/small", settings, FOR_TORCH)

    assert [asked for asked in site.asked if "resolve" in asked] == []


@pytest.fixture
def gguf_files(tmp_path, monkeypatch):
    """A repository with two quantizations, one of them split."""
    names = {"Tiny-Q8_0.gguf": gguf.GGMLQuantizationType.Q8_0, "Tiny-Q4_K_M.gguf": gguf.GGMLQuantizationType.Q4_0}
    for name, kind in names.items():
        write_gguf(tmp_path / name, kind)
        monkeypatch.setitem(FILES, name, (tmp_path / name).read_bytes())
    monkeypatch.setitem(FILES, "Tiny-F16-00001-of-00002.gguf", b"a part")
    return (*names, "Tiny-F16-00001-of-00002.gguf", "config.json")


def test_a_gguf_file_of_the_hub_is_fetched_by_its_quantization(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        use_hub(site.url)
        files = pull("huggingface.co/org/small:q8_0", settings, FOR_TORCH)

    assert files.name == "hf.co/org/small:Q8_0"
    assert files.source == "hub: org/small (Tiny-Q8_0.gguf)"
    assert files.quantization == "Q8_0"
    assert files.sha256 == hashlib.sha256(FILES["Tiny-Q8_0.gguf"]).hexdigest()
    assert files.weights == [files.folder / "model.gguf"]
    assert files.is_packed
    assert not (files.folder / "fetched").exists()
    assert resolve("hf.co/org/small:Q8_0", settings, FOR_TORCH) == files  # the hub is gone


def test_without_a_quantization_the_usual_one_is_taken_and_kept_as_it_is_for_mlx(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        use_hub(site.url)
        files = pull("hf.co/org/small", settings, FOR_MLX)
        again = pull("hf.co/org/small:Q4_K_M", settings, FOR_MLX)

    assert (files.folder / "model.gguf").read_bytes() == FILES["Tiny-Q4_K_M.gguf"]
    assert names_in(files.folder).count("fetched") == 0
    assert again.sha256 == files.sha256
    assert len([asked for asked in site.asked if asked.startswith("GET /org/small/resolve")]) == 1


def test_a_repository_of_gguf_files_alone_needs_no_prefix(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        use_hub(site.url)

        assert pull("org/small", settings, FOR_MLX).source == "hub: org/small (Tiny-Q4_K_M.gguf)"


def test_a_short_name_is_a_quantized_file_where_weights_stay_quantized(settings, use_hub, gguf_files):
    on_a_cpu = replace(FOR_TORCH, is_preferred=True)
    with serving(make_hub(gguf_files, repository="Qwen/Qwen3-4B-GGUF")) as site:
        use_hub(site.url)
        files = pull("qwen3", settings, on_a_cpu)

    assert (files.name, files.source) == ("qwen3", "hub: Qwen/Qwen3-4B-GGUF (Tiny-Q4_K_M.gguf)")
    assert resolve("qwen3:4b", settings, on_a_cpu) == files


def test_a_gguf_file_that_arrives_damaged_is_refused(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        site.files[f"/org/small/resolve/{COMMIT}/Tiny-Q8_0.gguf"] = FILES["Tiny-Q8_0.gguf"][:-1] + b"!"
        use_hub(site.url)
        with pytest.raises(DownloadError, match=r"Tiny-Q8_0\.gguf of org/small arrived damaged"):
            pull("hf.co/org/small:Q8_0", settings, FOR_TORCH)


def test_a_gguf_file_that_cannot_be_used_is_deleted(settings, use_hub, monkeypatch):
    monkeypatch.setitem(FILES, "Tiny-Q4_0.gguf", b"GGUF" + b"\0" * 100)
    with serving(make_hub(("Tiny-Q4_0.gguf",))) as site:
        use_hub(site.url)
        with pytest.raises(UnsupportedModel, match="its version is 0"):
            pull("hf.co/org/small", settings, FOR_TORCH)

    assert not list(settings.models_folder.rglob("*.gguf"))


def test_a_quantization_that_the_hub_does_not_have_and_a_part_that_is_missing_are_refused(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        use_hub(site.url)
        with pytest.raises(ModelNotFound, match="no file with the quantization Q2_K; there are F16, Q4_K_M, Q8_0"):
            pull("hf.co/org/small:Q2_K", settings, FOR_TORCH)
        with pytest.raises(UnsupportedModel, match="org/small lacks 1 of the 2 parts"):
            pull("hf.co/org/small:F16", settings, FOR_TORCH)


def test_without_an_engine_a_gguf_file_is_not_fetched(settings, use_hub, gguf_files):
    with serving(make_hub(gguf_files)) as site:
        use_hub(site.url)
        with pytest.raises(UnsupportedModel, match="no engine is installed"):
            pull("hf.co/org/small", settings, GgufSupport(False, False, "no engine is installed"))

    assert [asked for asked in site.asked if "resolve" in asked] == []


def test_a_model_that_was_damaged_here_is_fetched_again(settings, use_hub):
    with serving(make_hub()) as site:
        use_hub(site.url)
        files = pull("org/small", settings, FOR_TORCH)
        (files.folder / "model.safetensors").write_bytes(FILES["model.safetensors"][:-1])
        again = pull("org/small", settings, FOR_TORCH)

    assert (again.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_all_parts_of_a_split_file_are_fetched(settings, use_hub, tmp_path, monkeypatch):
    names = ["Tiny-Q8_0-00001-of-00002.gguf", "Tiny-Q8_0-00002-of-00002.gguf"]
    for part in split_gguf(tmp_path, names):
        monkeypatch.setitem(FILES, part.name, part.read_bytes())
    with serving(make_hub((*names, "config.json"))) as site:
        use_hub(site.url)
        files = pull("hf.co/org/small:Q8_0", settings, FOR_TORCH)
        again = pull("hf.co/org/small:Q8_0", settings, FOR_TORCH)

    assert files.weights == [files.folder / name for name in names]
    assert again == files
