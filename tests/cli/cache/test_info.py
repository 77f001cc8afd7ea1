"""`bough cache info`: the trees on disk, and what they take."""

from __future__ import annotations

import json
import os

from tests.cli.cache.conftest import PRINT_1, PRINT_2, open_disk, page_files


def test_info_without_trees_tells_the_budget_and_the_free_space(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_DISK", "5GB")

    result = invoke("cache", "info")

    facts = dict(line.split("   ", 1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert facts["trees"].strip() == "0, 0 bytes"
    assert facts["budget"].strip() == "5.4 GB"
    assert "2.1 GB always stay free" in facts["free"]


def test_info_shows_each_tree_in_columns(invoke, grow):
    grow("small")
    grow("org/large", PRINT_2, num_pages=2)

    header, large, small, *_ = invoke("cache", "info").stdout.splitlines()

    assert header.split()[:4] == ["TREE", "MODEL", "PAGES", "STATES"]
    assert small.split()[:4] == ["small-1f1f1f1f1f1f", "small", "3", "1"]
    assert large.split()[:4] == ["org--large-2f2f2f2f2f2f", "org/large", "2", "1"]
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
    monkeypatch.setenv("BOUGH_DISK", "0")

    assert "0: nothing is written" in invoke("cache", "info").stdout


def test_info_tells_of_a_tree_that_cannot_be_read(invoke, grow):
    (grow() / "index.sqlite").write_bytes(b"nonsense" * 1000)

    result = invoke("cache", "info")

    assert result.exit_code == 0
    assert result.stderr.startswith("small-1f1f1f1f1f1f: it cannot be read")
