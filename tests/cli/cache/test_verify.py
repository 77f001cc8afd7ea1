"""`bough cache verify`: damage is found, named and repaired; trees in use are not touched."""

from __future__ import annotations

import json
import os

from tests.cli.cache.conftest import PRINT_2, damage, open_disk, page_files


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
    assert (small["num_files"], small["problems"], small["is_in_use"], small["owner_pid"]) == (4, [], True, os.getpid())


def test_verify_says_that_a_tree_is_in_use_and_by_whom_and_calls_it_no_damage(invoke, grow):
    with open_disk(grow()):
        result = invoke("cache", "verify")

    assert result.exit_code == 0
    told = f"sound; in use by process {os.getpid()}: what changes meanwhile is left out"
    assert result.stdout == f"small-1f1f1f1f1f1f: 4 files, 3.8 kB, {told}\n"


def test_verify_finds_damage_in_a_tree_in_use(invoke, grow):
    folder = grow()
    damage(page_files(folder)[0])

    with open_disk(folder):
        result = invoke("cache", "verify")

    assert result.exit_code == 1
    assert "3 files" in result.stdout and "1 damaged" in result.stdout
    assert f"{page_files(folder)[0].name}: damaged" in result.stdout


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
