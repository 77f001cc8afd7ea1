"""`bough cache` and `bough rm` beside a running server: what it has open goes through it, the rest is done on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bough.cache.admin.trees import list_trees
from bough.models import ModelFiles, ModelFolder
from tests.cli.cache.conftest import page_files
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import Address

WORDS = "What grows where nobody walks, and who counts it? " * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server with two keys, of a model in its own model folder."""
    home = tmp_path_factory.mktemp("served")
    keys = home / "keys"
    keys.write_text("alices-key alice\nbobs-key bob\n")
    keys.chmod(0o600)
    make_words_folder(home / "made")
    files = put_model(home)
    with serving(files, home, keep_alive=None, keys_file=keys) as server:
        yield server


def put_model(home: Path) -> ModelFiles:
    """Put the model into the server's model folder, unless it is there: a test may have removed it."""
    store = ModelFolder(home / "data" / "models")
    if (found := store.find("small")) is not None:
        return found
    with store.making("small") as making:
        shutil.copytree(home / "made", making.folder, dirs_exist_ok=True)
        return making.commit(source="a test", sha256="12ab", num_parameters=1, quantization="")


@pytest.fixture
def here(served: Address, home: Path, monkeypatch: pytest.MonkeyPatch) -> Address:
    """The server, for commands with its folders and alice's key; both keys have something in the tree, on disk too."""
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(served.cache_folder))
    monkeypatch.setenv("BOUGH_DATA_FOLDER", str(served.cache_folder.parent / "data"))
    monkeypatch.setenv("BOUGH_API_KEY", "alices-key")
    put_model(served.cache_folder.parent)
    for key in ("alices-key", "bobs-key"):
        body = {"model": "small", "prompt": WORDS, "raw": True, "stream": False, "options": {"num_predict": 1}}
        headers = {"x-api-key": key}
        assert httpx.post(f"{served.url}/api/generate", json=body, headers=headers, timeout=60).status_code == 200
        assert httpx.post(f"{served.url}/api/cache/export", headers=headers, timeout=60).status_code == 200  # saves it
    return served


def test_info_tells_what_the_server_holds(invoke, here):
    found = json.loads(invoke("cache", "info", "--json").stdout)

    assert (found["server"]["url"], found["server"]["pid"]) == (here.url, os.getpid())
    assert [each["model"] for each in found["server"]["models"]] == ["small"]
    assert json.loads(invoke("cache", "info", "--local", "--json").stdout)["server"] is None


def test_export_and_import_of_a_tree_in_use_go_through_the_server(invoke, here, tmp_path):
    archive = tmp_path / "out.tar"

    exported = json.loads(invoke("cache", "export", "small", str(archive), "--json").stdout)
    imported = json.loads(invoke("cache", "import", str(archive), "--json").stdout)

    assert exported["num_items"] > 0 and archive.stat().st_size > exported["nbytes"]
    assert (imported["num_items"], imported["num_skipped"]) == (0, exported["num_items"])  # it is all there


def test_export_leaves_no_file_if_the_server_refuses(invoke, here, tmp_path, monkeypatch):
    monkeypatch.setenv("BOUGH_API_KEY", "nobodys-key")

    result = invoke("cache", "export", "small", str(tmp_path / "out.tar"))

    assert result.exit_code == 1 and "the key is not valid" in result.stderr
    assert not (tmp_path / "out.tar").exists()


def test_clear_through_the_server_deletes_what_the_key_has_and_no_more(invoke, here):
    (tree,) = list_trees(here.cache_folder / "trees")
    before = len(page_files(tree.folder))

    result = invoke("cache", "clear", "-y")

    assert result.exit_code == 0
    assert result.stdout.startswith(f"cleared {tree.name} through the server at {here.url} (")
    assert 0 < len(page_files(tree.folder)) < before
    assert "of other keys" in result.stdout


def test_clear_with_local_refuses_what_the_server_has_open(invoke, here):
    result = invoke("cache", "clear", "-y", "--local")

    assert result.exit_code == 1 and f"in use by process {os.getpid()}" in result.stderr


def test_doctor_finds_the_server(invoke, here):
    found = json.loads(invoke("doctor", "--json").stdout)["findings"]

    assert [each["text"] for each in found if each["topic"] == "server"] == [f"{here.url} runs, with small loaded"]


def test_rm_lets_the_server_unload_the_model_first(invoke, here):
    result = invoke("rm", "small", "-y", "--tree")

    headers = {"x-api-key": "alices-key"}
    assert result.exit_code == 0 and "deleted its tree small-" in result.stdout
    assert httpx.get(f"{here.url}/api/ps", headers=headers, timeout=10).json() == {"models": []}
    assert list_trees(here.cache_folder / "trees") == []
