"""`python -m benchmarks gpu` with a tiny model on the CPU: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.setup import PARTS
from tests.cli.conftest import Invoke

SMALL = ["--shape", "tiny", "--tokens", "40", "--lanes", "1,2", "--distinct", "0", "--steps", "2", "--rounds", "1"]


def test_the_command_prints_a_table_and_writes_the_same_json(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    words = [*SMALL, "--parts", "decode,memory", "--set", "device=cpu", "--out", str(file), "--json"]

    result = invoke("gpu", *words, env={"COLUMNS": "200"})

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(file.read_text())["figures"] == report["figures"]
    assert [len(report["figures"][part]) for part in ("decode", "memory")] == [6, 2]
    assert report["engine"]["device"] == "cpu" and report["errors"] == {}
    assert "2 on one prefix, greedy" in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--parts", "decode,all"], f"'all' is not one of {', '.join(PARTS)}"),
        (["--shape", "huge"], "'huge' is not one of llama-8b, tiny"),
        (["--set", "lanes"], "'lanes' is not a setting and its value"),
        (["--lanes", "0"], "'0' is not a list of numbers from 1 on"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(invoke: Invoke, words: list[str], problem: str) -> None:
    result = invoke("gpu", *words, env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_children_start_twice_and_a_server_streams_to_clients(invoke: Invoke) -> None:
    result = invoke("gpu", *SMALL, "--parts", "decode,start,http", "--profile", "--set", "device=cpu", "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [each["name"].partition(":")[0] for each in report["figures"]["start"]] == [
        *["cold compile cache"] * 3,
        *["warm compile cache"] * 3,
    ]
    alone, streams, share = report["figures"]["http"]
    assert "aten::" in result.stderr
    assert alone["value"] > 0 and {"engine", "event loop", "clients"} <= set(streams["detail"]["cpu_us"])
    assert share["value"] == pytest.approx(streams["value"] / alone["value"], abs=1e-3)
