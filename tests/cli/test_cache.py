"""The commands about the trees on disk, over real stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cache.disk import Disk
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.tokens import cut, pack
from bough.config import load_settings
from bough.models.fingerprint import tree_folder

PAGE_TOKENS = 4
PRINT_1, PRINT_2 = "1f" * 32, "2f" * 32

Grow = Callable[..., Path]


@pytest.fixture
def trees(home: Path) -> Path:
    return home / "cache" / "trees"


@pytest.fixture
def grow(home: Path) -> Grow:
    """Makes a tree with some pages and one state, and returns its folder."""

    def make(model: str = "small", fingerprint: str = PRINT_1, *, num_pages: int = 3, salt: str = "") -> Path:
        folder = tree_folder(load_settings(), model, fingerprint)
        with open_disk(folder, model, fingerprint) as disk:
            fill(disk, num_pages, salt)
        return folder

    return make


def open_disk(folder: Path, model: str = "small", fingerprint: str = PRINT_1) -> Disk:
    return Disk.open(
        folder, fingerprint=fingerprint, model=model, page_tokens=PAGE_TOKENS, budget_bytes=2**30, floor_bytes=0
    )


def fill(disk: Disk, num_pages: int, salt: str = "") -> None:
    tokens = pack(range(1, num_pages * PAGE_TOKENS + 1))
    root = disk.root(salt)
    digests = disk.digests(root, tokens)
    end = num_pages * PAGE_TOKENS
    for page in range(num_pages):
        start = page * PAGE_TOKENS
        rows = cut(tokens, start, start + PAGE_TOKENS)
        put(disk, Address(root, digests[page], rows, 0, start, start + PAGE_TOKENS), content(page))
    last = cut(tokens, end - PAGE_TOKENS)
    put(disk, Address(root, digests[num_pages - 1], last, 1, end, end), b"state" * 20)
    point = Address(root, digests[num_pages - 1], last, POINT, end, end)
    disk.put_point(point, reason=1, is_kept=True, is_superseded=False, last_used=1.0)
    assert disk.flush(10)


def put(disk: Disk, address: Address, payload: bytes) -> None:
    disk.put(address, lambda: payload, len(payload))


def content(page: int) -> bytes:
    return bytes([page]) * 1000


def contents(folder: Path, salt: str = "", fingerprint: str = PRINT_1) -> list[bytes]:
    """What a salt has in a tree, in the order of the prefix."""
    with open_disk(folder, fingerprint=fingerprint) as disk:
        return [bytes(disk.get(copy)) for copy in disk.copies() if copy.address.root == disk.root(salt)]


def page_files(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / "pages").rglob("*") if file.is_file())


def damage(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-1] ^= 1
    file.write_bytes(found)


def only_tree(trees: Path) -> TreeInfo:
    (tree,) = list_trees(trees)
    return tree


def test_info_without_trees_tells_the_budget_and_the_free_space(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_DISK_BYTES", "5GB")

    result = invoke("cache", "info")

    facts = dict(line.split("   ", 1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert facts["trees"].strip() == "0, 0 bytes"
    assert facts["budget"].strip() == "5.4 GB"
    assert "2.1 GB are left alone" in facts["free"]


def test_info_shows_each_tree_in_columns(invoke, grow):
    grow("small")
    grow("org/large", PRINT_2, num_pages=2)

    header, large, small, *_ = invoke("cache", "info").stdout.splitlines()

    assert header.split()[:5] == ["TREE", "MODEL", "FINGERPRINT", "PAGES", "STATES"]
    assert small.split()[:5] == ["small-1f1f1f1f1f1f", "small", "1f1f1f1f1f1f", "3", "1"]
    assert large.split()[:5] == ["org--large-2f2f2f2f2f2f", "org/large", "2f2f2f2f2f2f", "2", "1"]
    assert "just now" in small


def test_info_tells_who_has_a_tree_open(invoke, grow):
    with open_disk(grow()):
        assert f"process {os.getpid()}" in invoke("cache", "info").stdout
    assert "process" not in invoke("cache", "info").stdout


def test_info_as_json_has_exact_numbers(invoke, grow, trees):
    folder = grow()

    found = json.loads(invoke("cache", "info", "--json").stdout)

    (tree,) = found["trees"]
    assert tree["folder"] == str(folder) and tree["fingerprint"] == PRINT_1
    assert (tree["num_pages"], tree["num_states"], tree["num_points"]) == (3, 1, 1)
    assert tree["nbytes"] == sum(file.stat().st_size for file in page_files(folder))
    assert found["held_bytes"] == tree["nbytes"] + tree["index_bytes"]
    assert found["folder"] == str(trees)
    assert 0 <= found["budget_bytes"] <= found["free_bytes"]


def test_info_says_that_the_disk_is_off(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_DISK_BYTES", "0")

    assert "none: nothing is written" in invoke("cache", "info").stdout


def test_info_tells_of_a_tree_that_cannot_be_read(invoke, grow):
    (grow() / "index.sqlite").write_bytes(b"nonsense" * 1000)

    result = invoke("cache", "info")

    assert result.exit_code == 0
    assert result.stderr.startswith("small-1f1f1f1f1f1f: it cannot be read")


def test_verify_finds_a_sound_tree_sound(invoke, grow):
    grow()

    result = invoke("cache", "verify")

    assert result.exit_code == 0
    assert result.stdout.startswith("small-1f1f1f1f1f1f: 4 files, ") and "sound" in result.stdout


def test_verify_names_each_problem_and_exits_with_1(invoke, grow):
    files = page_files(grow())
    damage(files[0])
    files[1].unlink()

    result = invoke("cache", "verify", "small")

    first, *problems = result.stdout.splitlines()
    assert result.exit_code == 1
    assert first.endswith("2 damaged")
    assert sorted(problems) == sorted([f"  {files[0].name}: damaged", f"  {files[1].name}: missing"])


def test_verify_with_repair_removes_what_is_damaged(invoke, grow):
    damage(page_files(grow())[0])

    repaired = invoke("cache", "verify", "--repair")

    assert repaired.exit_code == 1 and "1 damaged, removed" in repaired.stdout
    assert invoke("cache", "verify").exit_code == 0


def test_verify_without_repair_changes_nothing(invoke, grow):
    folder = grow()
    damage(page_files(folder)[0])

    assert invoke("cache", "verify").exit_code == invoke("cache", "verify").exit_code == 1
    assert len(page_files(folder)) == 4


def test_an_index_that_cannot_be_read_is_not_called_repaired(invoke, grow):
    (grow() / "index.sqlite").write_bytes(b"nonsense" * 1000)

    result = invoke("cache", "verify", "--repair")

    assert result.exit_code == 1
    assert "index: " in result.stdout and "removed" not in result.stdout


def test_verify_reads_the_other_trees_when_one_is_in_use(invoke, grow):
    grow("large", PRINT_2)

    with open_disk(grow("small")):
        result = invoke("cache", "verify", "--json")

    large, small = json.loads(result.stdout)["trees"]
    assert result.exit_code == 0
    assert (large["num_files"], large["problems"], large["is_in_use"], large["owner_pid"]) == (4, [], False, None)
    assert (small["num_files"], small["problems"], small["is_in_use"], small["owner_pid"]) == (0, [], True, os.getpid())


def test_verify_says_that_a_tree_is_in_use_and_by_whom_and_calls_it_no_damage(invoke, grow):
    with open_disk(grow()):
        result = invoke("cache", "verify")

    assert result.exit_code == 0
    assert result.stdout == f"small-1f1f1f1f1f1f: in use by process {os.getpid()}, not read\n"


def test_damage_of_another_tree_counts_though_one_is_in_use(invoke, grow):
    damage(page_files(grow("large", PRINT_2))[0])

    with open_disk(grow("small")):
        result = invoke("cache", "verify")

    assert result.exit_code == 1
    assert "1 damaged" in result.stdout and "in use by process" in result.stdout


def test_repair_refuses_a_tree_in_use_and_calls_it_no_damage(invoke, grow):
    folder = grow()
    damage(page_files(folder)[0])

    with open_disk(folder):
        result = invoke("cache", "verify", "--repair", "--json")
        files = page_files(folder)

    (tree,) = json.loads(result.stdout)["trees"]
    assert result.exit_code == 3
    assert f"small-1f1f1f1f1f1f was not repaired: it is in use by process {os.getpid()}" in result.stderr
    assert (tree["is_in_use"], tree["problems"], tree["is_repaired"]) == (True, [], False)
    assert len(files) == 4


def test_the_exit_codes_of_verify_are_told_in_its_help(invoke):
    told = " ".join(invoke("cache", "verify", "--help").stdout.split())

    assert "in use" in told and "exit code is 3" in told


def test_verify_of_one_model_leaves_the_others_alone(invoke, grow):
    damage(page_files(grow("large", PRINT_2))[0])
    grow("small")

    assert invoke("cache", "verify", "small:latest").exit_code == 0


def test_verify_passes_over_what_was_set_aside(invoke, grow):
    folder = grow()
    (folder / "index.sqlite").write_bytes(b"nonsense" * 1000)
    open_disk(folder).close()

    result = invoke("cache", "verify")

    assert result.exit_code == 0
    assert "small-1f1f1f1f1f1f.set-aside-1 was set aside" in result.stderr


def test_clear_deletes_every_tree_and_tells_what_was_freed(invoke, grow, trees):
    folders = [grow("small"), grow("large", PRINT_2)]

    result = invoke("cache", "clear")

    assert result.exit_code == 0
    assert [line.split(" (")[0] for line in result.stdout.splitlines()] == [
        "deleted large-2f2f2f2f2f2f",
        "deleted small-1f1f1f1f1f1f",
    ]
    assert not any(folder.exists() for folder in folders)


def test_clear_as_json_counts_the_freed_bytes(invoke, grow):
    folder = grow()
    held = sum(file.stat().st_size for file in page_files(folder))

    found = json.loads(invoke("cache", "clear", "--yes", "--json").stdout)

    assert found["freed_bytes"] == found["trees"][folder.name] >= held
    assert found["refused"] == {}


def test_clear_of_one_model_takes_all_its_trees_and_no_others(invoke, grow, trees):
    grow("small")
    set_aside = grow("small", PRINT_2)
    (set_aside / "index.sqlite").write_bytes(b"nonsense" * 1000)
    open_disk(set_aside, fingerprint=PRINT_2).close()
    grow("small-er")

    result = invoke("cache", "clear", "small", "--yes")

    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3
    assert only_tree(trees).model == "small-er"


def test_clear_asks_on_a_terminal(invoke, grow, monkeypatch):
    folder = grow()
    monkeypatch.setattr("bough.cli.terminal.screen.is_interactive", lambda: True)

    refused = invoke("cache", "clear", "small", piped="n\n")

    assert refused.exit_code == 1 and "delete small-1f1f1f1f1f1f (" in refused.stderr
    assert len(page_files(folder)) == 4
    assert invoke("cache", "clear", "small", piped="y\n").exit_code == 0
    assert not folder.exists()


def test_clear_refuses_a_tree_in_use_with_its_process(invoke, grow):
    folder = grow("small")
    unused = grow("large", PRINT_2)

    with open_disk(folder):
        result = invoke("cache", "clear", "--yes")

    assert result.exit_code == 1
    assert result.stderr.startswith("error: small-1f1f1f1f1f1f was not deleted: ")
    assert f"process {os.getpid()}" in result.stderr
    assert len(page_files(folder)) == 4 and not unused.exists()


@pytest.mark.parametrize("words", [["verify"], ["clear"]])
def test_without_trees_there_is_nothing_to_do(invoke, words):
    result = invoke("cache", *words)

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "there are no trees on disk yet\n"


@pytest.mark.parametrize("words", [["verify", "smal"], ["clear", "smal", "--yes"], ["export", "smal", "out.tar"]])
def test_an_unknown_model_is_an_error_that_says_what_there_is(invoke, grow, words):
    grow()

    result = invoke("cache", *words)

    assert result.exit_code == 1
    assert result.stderr == "error: no tree of 'smal' on disk; there are small-1f1f1f1f1f1f\n"


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

    assert result.exit_code == 1 and "cannot take the file" in result.stderr
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
