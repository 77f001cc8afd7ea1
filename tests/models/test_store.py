"""The local model folder: what is in it, what a killed run leaves, and names that try to leave it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bough.config import Settings
from bough.errors import ModelError, ModelNotFound
from bough.models import store as store_module
from bough.models.sources import GgufSupport, resolve
from bough.models.store import ModelFolder


def add(store: ModelFolder, name: str, content: str = "{}"):
    with store.making(name) as making:
        (making.folder / "config.json").write_text(content)
        return making.commit(source="a test", sha256="12ab", num_parameters=7, quantization="Q4_1")


def test_a_committed_model_is_found_with_its_record(tmp_path):
    store = ModelFolder(tmp_path / "models")

    add(store, "small")

    found = store.find("small")
    assert found is not None
    assert (found.name, found.source, found.sha256, found.num_parameters) == ("small", "a test", "12ab", 7)
    assert found.created is not None
    assert found.config == {}
    assert [each for each in store.list() if each.sha256 == "12ab"] == [found]


def test_latest_is_the_same_model(tmp_path):
    store = ModelFolder(tmp_path)

    assert store.find("small:latest") is None
    assert add(store, "small:latest").folder == tmp_path / "small"
    assert store.find("small:latest") == store.find("small") is not None


def test_models_are_listed_by_name_with_hub_names_as_they_are(tmp_path):
    store = ModelFolder(tmp_path)
    for name in ("zeta", "org/name", "alpha"):
        add(store, name)

    assert [model.name for model in store.list()] == ["alpha", "org/name", "zeta"]
    assert "alpha, org/name, zeta" in store.describe()


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path):
    assert ModelFolder(tmp_path / "none").list() == []


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../x",
        "/etc",
        "a/../b",
        "a/b/c",
        "a\\b",
        "",
        ".",
        ".hidden",
        "a/.b",
        "a--b",
        "~",
        "a\n",
        "a/",
        "a:",
        "a:b:c",
        "a:b/c",
        "a@b",
    ],
)
def test_names_that_are_no_names_are_refused_everywhere(tmp_path, name):
    (tmp_path / "victim").mkdir()
    store = ModelFolder(tmp_path / "models")

    for use in (store.find, store.remove, lambda name: add(store, name)):
        with pytest.raises(ModelNotFound, match="is not a model name"):
            use(name)

    assert (tmp_path / "victim").exists()


def test_removing_gives_the_bytes_and_leaves_the_others(tmp_path):
    store = ModelFolder(tmp_path)
    size_bytes = add(store, "small").size_bytes
    add(store, "other")

    assert store.remove("small") == size_bytes > 0
    assert [model.name for model in store.list()] == ["other"]
    with pytest.raises(ModelNotFound, match="local models: other"):
        store.remove("small")


def test_a_failed_making_leaves_nothing(tmp_path):
    store = ModelFolder(tmp_path)

    with pytest.raises(RuntimeError), store.making("small") as making:
        (making.folder / "config.json").write_text("{}")
        raise RuntimeError

    assert store.list() == []
    assert not making.folder.exists()


def test_the_leftovers_of_a_killed_run_are_no_model_and_are_cleaned(tmp_path):
    store = ModelFolder(tmp_path)
    leftovers = tmp_path / ".making-small"
    leftovers.mkdir()
    (leftovers / "half.safetensors").write_bytes(b"half")
    (leftovers / "bough.json").write_text("{}")

    assert store.list() == []
    model = add(store, "small")

    assert sorted(file.name for file in model.folder.iterdir()) == ["bough.json", "config.json"]
    assert not leftovers.exists()


def break_off(store: ModelFolder, commit: str) -> None:
    with pytest.raises(RuntimeError), store.making("small", commit) as making:
        (making.folder / "half").write_bytes(b"half")
        raise RuntimeError


def test_leftovers_are_kept_to_go_on_from_at_the_same_commit(tmp_path):
    store = ModelFolder(tmp_path)
    break_off(store, "aaaa")

    with store.making("small", "aaaa") as making:
        assert (making.folder / "half").read_bytes() == b"half"
        model = making.commit("a test", "aaaa", 0, "")

    assert sorted(file.name for file in model.folder.iterdir()) == ["bough.json", "half"]


@pytest.mark.parametrize("commit", ["bbbb", ""])
def test_leftovers_of_another_commit_are_deleted(tmp_path, commit):
    store = ModelFolder(tmp_path)
    break_off(store, "aaaa")

    with store.making("small", commit) as making:
        assert not (making.folder / "half").exists()


def test_a_making_that_nothing_came_of_leaves_nothing(tmp_path):
    with ModelFolder(tmp_path).making("small", "aaaa") as making:
        pass

    assert not making.folder.exists()


def test_a_model_made_again_replaces_the_old_one(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"old": 1}')

    assert add(store, "small", '{"new": 1}').config == {"new": 1}
    assert [file.name for file in visible(tmp_path)] == ["small"]


def test_a_model_that_a_killed_run_was_replacing_is_put_back(tmp_path):
    store = ModelFolder(tmp_path)
    old = add(store, "small")
    looks = [store.list, lambda: [store.find("small")], lambda: [add(store, "small") and store.find("small")]]
    for look in looks:
        (tmp_path / "small").rename(tmp_path / ".replaced-small")  # what a kill just before the last rename leaves

        assert [model and model.name for model in look()] == [old.name]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock-small", "small"]


def test_a_model_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"old": 1}')
    replace = Path.replace

    def refuse_the_new(path: Path, target: Path) -> Path:
        if path.name == ".making-small":
            raise PermissionError("no")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse_the_new)
    with pytest.raises(ModelError, match="PermissionError"):
        add(store, "small", '{"new": 1}')

    [model] = store.list()
    assert model.config == {"old": 1}


def test_what_a_killed_run_left_of_a_removed_model_stays_removed(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")
    (tmp_path / "small").rename(tmp_path / ".removed-small")

    assert store.list() == []
    assert store.find("small") is None


def test_of_two_that_remove_the_same_model_one_finds_none(tmp_path, monkeypatch):
    size_bytes = add(ModelFolder(tmp_path), "small").size_bytes
    both_looked = threading.Barrier(2)
    lock = store_module.FileLock
    monkeypatch.setattr(store_module, "FileLock", lambda path: both_looked.wait(10) * 0 or lock(path))
    results: list[object] = []

    def remove() -> None:
        try:
            results.append(ModelFolder(tmp_path).remove("small"))
        except Exception as error:
            results.append(type(error))

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 2
    assert set(results) == {size_bytes, ModelNotFound}


def test_a_folder_that_cannot_be_made_is_a_model_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = ModelFolder(tmp_path / "file" / "models")

    assert store.list() == []
    with pytest.raises(ModelError, match=r"cannot use .*file/models"):
        add(store, "small")


def test_a_folder_that_cannot_be_read_is_a_model_error(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "iterdir", refuse)

    with pytest.raises(ModelError, match=r"cannot use .*PermissionError"):
        ModelFolder(tmp_path).list()


def test_a_commit_that_cannot_be_written_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"cannot use .*making-small"), ModelFolder(tmp_path).making("small") as making:
        making.folder.rmdir()
        making.commit("a test", "", 0, "")


def test_a_model_that_cannot_be_removed_is_a_model_error(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")
    (tmp_path / ".removed-small").write_bytes(b"in the way")

    with pytest.raises(ModelError, match=r"cannot use .*small"):
        store.remove("small")


def test_two_that_make_the_same_model_take_turns(tmp_path):
    order = []

    def make() -> None:
        with ModelFolder(tmp_path).making("small") as making:
            order.append("in")
            (making.folder / "config.json").write_text("{}")
            making.commit("a test", "", 0, "")
            order.append("out")

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert order == ["in", "out"] * 3


def test_a_directory_with_a_broken_record_is_left_out(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "bough.json").write_text("{")

    assert ModelFolder(tmp_path).list() == []


def visible(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if not file.name.startswith(".")]


def test_a_name_that_no_file_system_takes_is_no_name(tmp_path):
    with pytest.raises(ModelNotFound, match="it has 201 characters, more than 200"):
        ModelFolder(tmp_path).find("a" * 201)
    assert ModelFolder(tmp_path).find("a" * 200) is None


def test_a_tag_is_a_part_of_the_name(tmp_path):
    store = ModelFolder(tmp_path / "models")
    small, large = add(store, "org/some:4b"), add(store, "org/some")

    assert store.find("org/some:4b") == small
    assert store.find("org/some:latest") == large
    assert {model.folder.name for model in store.list()} == {"org--some@4b", "org--some"}


def test_a_name_on_the_hub_has_one_spelling(tmp_path):
    store = ModelFolder(tmp_path / "models")
    made = add(store, "huggingface.co/org/name:q4_k_m")

    assert made.name == "hf.co/org/name:Q4_K_M"
    assert store.find("hf.co/org/name:Q4_K_M") == store.find("hf.co/org/name:q4_k_m") == made
    assert add(store, "hf.co/org/name:Model-q4.gguf").name == "hf.co/org/name:Model-q4.gguf"
    assert store.find("hf.co/org/name") is None


def start_child(folder: Path, code: str) -> subprocess.Popen[str]:
    """Another process that has begun something with the store in this folder, and does not go on."""
    begin = "import os, sys, threading\nfrom pathlib import Path\nfrom bough.models.aliases import Overlay\n"
    begin += "from bough.models.store import ModelFolder\nstore = ModelFolder(Path(sys.argv[1]))\n"
    begin += "def hang(*_):\n    print('begun', flush=True)\n    threading.Event().wait()\n"
    child = subprocess.Popen([sys.executable, "-c", begin + code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir() if path.name.startswith((".making", ".writing")))


MAKE = "with store.making('big') as making:\n    (making.folder / 'half').write_bytes(bytes(1000))\n    hang()\n"
WRITE_ALIAS = "os.fsync = hang\nstore.add_alias('second', 'small', Overlay())\n"


def test_what_another_process_is_at_work_on_stays_until_it_is_killed(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")
    children = [start_child(tmp_path, code) for code in (MAKE, WRITE_ALIAS)]
    try:
        add(store, "other")
        assert leftovers(tmp_path) == [".making", ".writing"]
    finally:
        for child in children:
            kill(child)

    add(store, "third")

    assert leftovers(tmp_path) == []
    assert [model.name for model in store.list()] == ["other", "small", "third"] and store.find_alias("second") is None


def test_loading_a_model_deletes_what_killed_runs_left_but_for_parts_of_downloads(tmp_path):
    settings = Settings(data_folder=tmp_path, cache_folder=tmp_path)
    store = ModelFolder(settings.models_folder)
    add(store, "small")
    with store.making("download", commit="abc") as making:
        (making.folder / "part").write_text("a part")
    for name in (".making-gone", ".removed-gone"):
        (store.folder / name).mkdir()
        (store.folder / name / "weights").write_bytes(bytes(100))
    (store.folder / ".writing-abc").write_text("{")

    resolve("small", settings, GgufSupport(is_readable=False, is_convertible=False))

    assert sorted(path.name for path in store.folder.iterdir() if not path.name.startswith(".lock-")) == [
        ".making-download",
        "small",
    ]
