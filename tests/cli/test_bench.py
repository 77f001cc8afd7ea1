"""`bough bench` over the fake engine: what is printed, what is refused, and what a failed plot leaves of it."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cli.conftest import make_runner

SMALL = ["--conversations", "1", "--turns", "2", "--system-words", "4", "--message-words", "2", "--reply-tokens", "1"]


@pytest.fixture
def switch(invoke, runner, monkeypatch, tmp_path):
    """Run a small `bough bench switch` in an empty working folder."""
    work_folder = tmp_path / "work"
    work_folder.mkdir()
    monkeypatch.chdir(work_folder)
    monkeypatch.setattr("bough.runner.load", lambda *args, **settings: runner)
    monkeypatch.setattr("bough.bench.switch.measure_overhead", lambda *args, **options: 0.0)
    return lambda *flags: invoke("bench", "switch", *SMALL, *flags)


def test_no_plot_is_written_unless_asked_for(switch, tmp_path):
    result = switch()

    assert result.exit_code == 0 and "single entry" in result.stdout
    assert list((tmp_path / "work").iterdir()) == []


def test_json_is_the_last_line_whether_or_not_there_is_a_plot(switch, tmp_path):
    result = switch("--json", "--png", "plots/switch.png")

    assert "strategies" in json.loads(result.stdout.splitlines()[-1])
    assert "plot: " in result.stderr
    assert (tmp_path / "work" / "plots" / "switch.png").stat().st_size > 0


@pytest.mark.parametrize("file", ["a file/switch.png", "switch.nonsense"])
def test_a_plot_that_fails_is_told_and_loses_nothing(switch, tmp_path, file):
    (tmp_path / "work" / "a file").touch()

    result = switch("--json", "--png", file)

    assert result.exit_code == 1
    assert "strategies" in json.loads(result.stdout.splitlines()[-1])
    assert result.stderr.splitlines()[-1].startswith("error: the plot cannot be written")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(switch, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setattr("bough.runner.load", lambda *args, **settings: 1 / 0)

    result = switch("--png", "switch.png")

    assert result.exit_code == 1
    assert "pip install 'bough-llm[bench]'" in result.stderr


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """The values of `weights` that models were loaded with."""
    seen = []

    def load(name=None, *, weights, **settings):
        seen.append(weights)
        return make_runner(tmp_path / weights, weights=weights)

    monkeypatch.setattr("bough.runner.load", load)
    return seen


def test_steps_and_runs_are_a_table_with_the_load_and_one_line_of_json(invoke, loaded, tmp_path):
    sizes = ["--lanes", "1,2", "--tokens", "1,2", "--depth", "0,3", "--steps", "2", "--rounds", "1"]

    result = invoke("bench", "decode", *sizes, "--json", "--png", str(tmp_path / "speed.png"), env={"COLUMNS": "200"})

    assert result.exit_code == 0, result.output
    assert loaded == ["float32", "auto"]
    report = json.loads(result.stdout.splitlines()[-1])
    for unit in ("lanes", "tokens"):
        sizes = [(each["rows"], each[unit]) for each in report["figures"] if unit in each]
        assert sizes[::2] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert set(report["load"]) == {"start", "end"} and set(report["engines"]) == {"float32", "auto"}
    assert "against float32" in result.stderr and " at the end" in result.stderr
    assert "the engine runs float32 and auto the same way" in result.stderr
    assert (tmp_path / "speed.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["decode", "--weights", "q3"], "'q3' is not one of auto, packed, float32, q8_0, q4_0"),
        (["decode", "--lanes", "1,x"], "'1,x' is not a list of numbers from 1 on"),
        (["decode", "--depth", "-1"], "'-1' is not a list of numbers from 0 on"),
        (["decode", "--tokens", "x"], "'x' is not a list of numbers from 0 on"),
    ],
)
def test_sizes_and_weights_that_cannot_be_are_refused_before_anything_is_loaded(invoke, loaded, words, problem):
    result = invoke("bench", *words, env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.replace("│", " ").split())
    assert loaded == []


def test_the_demo_says_each_stage_in_a_line_when_its_output_is_no_terminal(invoke, runner, monkeypatch):
    def load(model, *, progress, **settings):
        progress.start("self-check of the engine", None)
        return runner

    monkeypatch.setattr("bough.runner.load", load)

    result = invoke("bench", "demo")

    assert result.exit_code == 0
    stages = [line for line in result.stdout.splitlines() if re.match("loading|self-check|.*answered", line)]
    assert stages == [
        "loading the default model",
        "self-check of the engine",
        *(f"{name}: {n} of 12 questions answered" for name in ("tree", "single entry", "no cache") for n in (4, 8, 12)),
    ]
