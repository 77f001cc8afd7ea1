"""`bough cache export` and `import`: a tree in a file, here and elsewhere."""

from __future__ import annotations

import json
import os

from bough.cache.admin.trees import list_trees
from bough.cache.tree.address import Address
from bough.tokens import pack
from tests.cli.cache.conftest import PRINT_1, PRINT_2, contents, only_tree, open_disk, put


def test_what_was_exported_comes_back_elsewhere(invoke, grow, home, trees, monkeypatch):
    before = contents(grow())
    archive = home / "small.tar"

    exported = invoke("cache", "export", "small", str(archive))
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(home / "elsewhere"))
    imported = invoke("cache", "import", str(archive))

    assert (exported.exit_code, imported.exit_code) == (0, 0)
    assert exported.stdout.startswith("4 pages and states of small-1f1f1f1f1f1f (")
    assert imported.stdout.startswith("added 4 pages and states (") and "small-1f1f1f1f1f1f" in imported.stdout
    tree = only_tree(home / "elsewhere" / "trees")
    assert (tree.model, tree.fingerprint, tree.num_points) == ("small", PRINT_1, 1)
    assert contents(tree.folder) == before


def test_only_the_salt_that_is_named_is_exported_and_it_may_change_on_import(invoke, grow, home):
    grow(salt="")
    folder = grow(num_pages=2, salt="alice")
    archive = str(home / "alice.tar")

    found = json.loads(invoke("cache", "export", "small", archive, "--salt", "alice", "--json").stdout)
    invoke("cache", "import", archive, "--salt", "bob")

    assert found["num_items"] == 3
    assert contents(folder, "bob") == contents(folder, "alice") != contents(folder)


def test_importing_twice_adds_nothing(invoke, grow, home):
    grow()
    archive = str(home / "small.tar")
    invoke("cache", "export", "small", archive)

    result = invoke("cache", "import", archive, "small", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "num_items": 0,
        "num_skipped": 4,
        "nbytes": 0,
        "problems": [],
        "tree": "small-1f1f1f1f1f1f",
    }


def test_export_does_not_overwrite(invoke, grow, home):
    grow()
    (home / "mine").write_text("mine")

    result = invoke("cache", "export", "small", str(home / "mine"))

    assert result.exit_code == 1 and "exists already" in result.stderr
    assert (home / "mine").read_text() == "mine"


def test_a_tree_of_states_alone_comes_back_elsewhere(invoke, grow, home, monkeypatch):
    with open_disk(grow(num_pages=1)) as disk:
        root = disk.root("")
        put(disk, Address(root, disk.keys.first(root), pack(range(9)), 1, 9, 9), b"a state of a whole prefix")
    archive = home / "states.tar"

    exported = json.loads(invoke("cache", "export", "small", str(archive), "--json").stdout)
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(home / "elsewhere"))
    imported = invoke("cache", "import", str(archive))

    assert (exported["num_items"], exported["num_skipped"], imported.exit_code) == (3, 0, 0)
    assert b"a state of a whole prefix" in contents(only_tree(home / "elsewhere" / "trees").folder)


def test_a_model_with_several_trees_is_exported_by_the_name_of_the_tree(invoke, grow, home):
    grow("small", PRINT_1)
    grow("small", PRINT_2)

    result = invoke("cache", "export", "small", str(home / "out"))

    assert result.exit_code == 1
    assert "name one: small-1f1f1f1f1f1f, small-2f2f2f2f2f2f" in result.stderr
    assert invoke("cache", "export", "small-2f2f2f2f2f2f", str(home / "out")).exit_code == 0


def test_export_of_a_tree_in_use_names_the_process(invoke, grow, home):
    with open_disk(grow()):
        result = invoke("cache", "export", "small", str(home / "out"))

    assert result.exit_code == 1 and f"process {os.getpid()}" in result.stderr
    assert not (home / "out").exists()


def test_import_for_a_model_whose_trees_are_of_other_weights_is_refused(invoke, grow, home, trees):
    grow("small", PRINT_1)
    archive = str(home / "small.tar")
    invoke("cache", "export", "small", archive)
    invoke("cache", "clear", "--yes")
    grow("small", PRINT_2)

    refused = invoke("cache", "import", archive, "small")

    assert refused.exit_code == 1
    assert "1f1f1f1f1f1f" in refused.stderr and "2f2f2f2f2f2f" in refused.stderr
    assert only_tree(trees).fingerprint == PRINT_2
    assert invoke("cache", "import", archive).exit_code == 0
    assert {tree.fingerprint for tree in list_trees(trees)} == {PRINT_1, PRINT_2}


def test_import_finds_the_tree_of_the_same_weights_under_another_name(invoke, grow, home, trees):
    grow("small")
    archive = str(home / "small.tar")
    invoke("cache", "export", "small", archive)
    invoke("cache", "clear", "--yes")
    grow("mine", num_pages=1)

    invoke("cache", "import", archive)

    tree = only_tree(trees)
    assert (tree.model, tree.num_pages) == ("mine", 3)


def test_import_never_touches_a_tree_that_cannot_be_used(invoke, grow, home):
    folder = grow()
    archive = str(home / "small.tar")
    invoke("cache", "export", "small", archive)
    (folder / "index.sqlite").write_bytes(b"nonsense" * 1000)

    result = invoke("cache", "import", archive)

    assert result.exit_code == 1 and "cannot be imported into" in result.stderr
    assert (folder / "index.sqlite").read_bytes().startswith(b"nonsense")


def test_import_stays_within_the_budget_and_says_so(invoke, grow, home, trees):
    grow()
    archive = str(home / "small.tar")
    invoke("cache", "export", "small", archive)
    invoke("cache", "clear", "--yes")

    result = invoke("cache", "import", archive, "--disk", "2700", "--disk-free", "0")

    assert result.exit_code == 1 and "no room" in result.stderr
    assert only_tree(trees).nbytes <= 2700


def test_import_refuses_when_the_disk_is_off_and_what_is_no_archive(invoke, grow, home, trees):
    (home / "text").write_text("text")

    off = invoke("cache", "import", str(home / "text"), "--disk", "0")
    no_archive = invoke("cache", "import", str(home / "text"))

    assert off.exit_code == 1 and "turned off" in off.stderr
    assert no_archive.exit_code == 1 and "text is not an archive" in no_archive.stderr
    assert list_trees(trees) == []
