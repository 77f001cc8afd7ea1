"""`bough cache clear`, and how the commands choose trees."""

from __future__ import annotations

import json
import os

import pytest

from tests.cli.cache.conftest import PRINT_2, only_tree, open_disk, page_files


def test_clear_deletes_every_tree_and_tells_what_was_freed(invoke, grow, trees):
    folders = [grow("small"), grow("large", PRINT_2)]

    result = invoke("cache", "clear", "-y")

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


def test_clear_deletes_nothing_without_a_terminal_and_without_yes(invoke, grow):
    folder = grow()

    result = invoke("cache", "clear")

    assert result.exit_code == 1 and result.stderr.endswith("this needs -y without a terminal\n")
    assert len(page_files(folder)) == 4


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
