"""Bough beside llama.cpp: a stand-in that prints what llama.cpp's programs print, and the real engine on a tiny file."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from tests.models.tiny_gguf import write_gguf

BATCHED = """#!/bin/sh
echo 'loading'
echo '{"pl": 1, "speed_tg": 50.0}'
echo '{"pl": 2, "speed_tg": 80.0}'
"""
BENCH = """#!/bin/sh
case "$*" in
    *"-n 0"*) echo '[{"n_prompt": 16, "avg_ts": 300.0}]' ;;
    *) echo '[{"n_prompt": 0, "avg_ts": 60.0}]' ;;
esac
"""


def write_tool(file: Path, script: str) -> None:
    file.write_text(script)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    write_tool(tmp_path / "llama-batched-bench", BATCHED)
    write_tool(tmp_path / "llama-bench", BENCH)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOUGH_DATA_FOLDER", str(tmp_path / "data"))
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "tiny.gguf"


def run(file: Path, tools: Path, *more: str) -> object:
    sizes = ("--lanes", "1,2", "--tokens", "16", "--depth", "0,20", "--steps", "2", "--rounds", "1", "--threads", "1")
    return CliRunner().invoke(app, ["llama-cpp", str(file), "--tools", str(tools), *sizes, *more])


def test_both_sides_are_measured_at_every_size(file, tools):
    done = run(file, tools, "--json")

    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert [(each["what"], each["size"], each["depth"]) for each in figures] == [
        (what, size, depth) for depth in (0, 20) for what, size in (("decode", 1), ("decode", 2), ("prefill", 16))
    ]
    assert {each["llama_cpp"] for each in figures if each["size"] == 1} == {60.0}  # the better of both programs
    assert all(each["ratio"] == pytest.approx(each["bough"] / each["llama_cpp"], abs=1e-3) for each in figures)


def test_what_a_program_of_llama_cpp_says_when_it_fails_is_told(file, tools):
    write_tool(tools / "llama-batched-bench", "#!/bin/sh\necho 'no such model' >&2\nexit 3\n")

    done = run(file, tools)

    assert done.exit_code != 0
    assert "llama-batched-bench ended with 3: no such model" in str(done.exception)
