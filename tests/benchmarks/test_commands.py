"""`python -m benchmarks`: what commands print, and what they refuse."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import make_runner


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """The values of `weights` that models were loaded with."""
    seen = []

    def load(name=None, *, weights, **settings):
        seen.append(weights)
        return make_runner(tmp_path / weights, weights=weights)

    monkeypatch.setattr("bough.runner.load", load)
    return seen


def test_quality_compares_every_way_with_float32(invoke, loaded):
    result = invoke("quality", "--weights", "float32,q8_0,packed", "--tokens", "12", "--prompts", "3", "--json")

    assert result.exit_code == 0, result.output
    assert loaded == ["float32", "q8_0", "packed"]
    figures = json.loads(result.stdout.splitlines()[-1])["figures"]
    assert [(each["prompt"], each["weights"], each["positions"]) for each in figures[-2:]] == [
        ("all", "q8_0", 12),
        ("all", "packed", 12),
    ]


def test_quality_refuses_to_compare_float32_with_itself_before_anything_is_loaded(invoke, loaded):
    result = invoke("quality", "--weights", "float32", env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert "'float32' names no weights to compare with float32" in " ".join(result.stderr.replace("│", " ").split())
    assert loaded == []


def test_router_tells_of_decisions_pages_and_messages(invoke):
    words = ["--replicas", "4", "--pages", "10000", "--decisions", "100", "--rate", "50"]
    result = invoke("router", *words, "--json", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert figures["pages"] == 10_000
    assert 0 < figures["messages_per_s"] <= 50
    assert 16 * figures["changes_per_s"] < figures["message_bytes_per_s"]
    assert "4 replicas, 10,000 pages known" in result.stderr
