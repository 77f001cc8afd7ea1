"""`bough replay` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bough.cli.main import app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    prompts = ([1, 2, 3], [1, 4, 5], [1, 2, 3], [6, 7], [1, 2, 3])
    rows = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 0, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    file = tmp_path / "hand.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def replay(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, words)])


def test_it_ends_with_one_line_of_json(trace: Path) -> None:
    done = replay(trace, "--budget", "58%,100%", "--policy", "duel,single", "--json")

    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "trace": "hand.jsonl",
        "requests": 5,
        "results": [
            {"policy": "duel", "budget": 0.58, "reused_share": 5 / 14, "evictions": 5},
            {"policy": "duel", "budget": 1.0, "reused_share": 7 / 14, "evictions": 0},
            {"policy": "single", "budget": 0.58, "reused_share": 2 / 14, "evictions": 9},
            {"policy": "single", "budget": 1.0, "reused_share": 2 / 14, "evictions": 9},
        ],
    }


def test_results_of_recurrent_models_tell_what_their_states_cost(trace: Path) -> None:
    done = replay(trace, "--budget", "100%", "--policy", "lru,placed,spaced-512", "--json")
    # A state is worth three blocks, and there is room for seven.
    # placed   123|   1|, and no room for 45|   1 reused, no room for 23|   67|, and 1| goes   123|, and 67| goes
    # spaced   1|     1 reused, no room         1 reused, no room           6|, and 1| goes    1|, and 6| goes
    assert json.loads(done.stdout)["results"] == [
        {"policy": "lru", "budget": 1.0, "reused_share": 7 / 14, "evictions": 0},
        {"policy": "placed", "budget": 1.0, "reused_share": 1 / 14, "evictions": 5, "states": 4, "state_share": 0.62},
        {"policy": "spaced-512", "budget": 1.0, "reused_share": 2 / 14, "evictions": 2, "states": 3, "state_share": 0.75},
    ]


def test_a_second_table_tells_what_states_cost(trace: Path) -> None:
    done = replay(trace, "--budget", "100%", "--policy", "duel,placed")
    assert "bytes held that are states" in done.stdout
    assert "bytes held that are states" not in replay(trace, "--policy", "duel").stdout


def test_several_traces_give_a_line_each_and_nothing_else_on_standard_output(trace: Path) -> None:
    done = replay(trace, trace, "--json")
    assert [json.loads(line)["trace"] for line in done.stdout.splitlines()] == ["hand.jsonl"] * 2


def test_a_table_has_a_row_for_each_policy_and_a_column_for_each_budget(trace: Path) -> None:
    done = replay(trace, "--budget", "0.5%,58", "--policy", "all")
    assert done.exit_code == 0
    for text in (
        "0.5 %",
        "58 %",
        "35.7%",
        "single entry",
        "offline reference",
        "no limit",
        "50.0%",
        "5 requests, 7 blocks of 512 tokens",
    ):
        assert text in done.stdout


def test_a_plot_is_written(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "plots" / "hand.png"
    assert replay(trace, trace, "--policy", "lru", "--png", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "0%"), "'0%' is not above 0% and at most 100%"),
        (("--budget", "3%,101%"), "'101%' is not above 0% and at most 100%"),
        (("--budget", "nan%"), "'nan%' is not above 0% and at most 100%"),
        (("--budget", "much"), "'much' is not a percentage such as 3%"),
        (("--policy", "duel,lfu"), "'lfu' is not one of duel, lru"),
    ],
)
def test_bad_usage_is_told_before_anything_is_read(words: tuple[str, str], message: str) -> None:
    done = replay("no-such-file", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_a_missing_trace_is_an_error_with_its_name(tmp_path: Path) -> None:
    done = replay(tmp_path / "none.jsonl")
    assert done.exit_code == 1
    assert "there is no file" in done.stderr
