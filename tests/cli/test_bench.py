"""`bough bench switch` over the fake engine: what is printed, and what a failed plot leaves of it."""

from __future__ import annotations

import json
import sys

import pytest

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
    assert "pip install 'bough[bench]'" in result.stderr
