"""What a type checker sees: every public name is typed, options are known by name and type, mistakes are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bough
from bough.config import Settings
from bough.types import SamplingParams
from tests.runner import user_script
from tests.tiny_encoders import make_reranker

HERE = Path(__file__).parent
RIGHT, WRONG = HERE / "user_script.py", HERE / "wrong_script.py"
OF_SERVERS = {
    *("aliases", "allowed_hosts", "api_key", "host", "keep_alive", "keys_file", "log_json", "max_body", "max_models"),
    *("origins", "port", "queue", "rate_limit", "ray", "replicas", "request_timeout", "sort_tools", "stop_after"),
}
CONFIG = """
[mypy]
strict = True
follow_imports = silent

[mypy-bough.engines.torch.*,bough.engines.mlx.*,torch.*,transformers.*,tokenizers.*,numpy.*,huggingface_hub.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The errors that mypy finds in the two scripts, as "file:line: error: text [code]". It does not read the engines.

    What it knows of unchanged files is kept in pytest's cache.
    """
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    cache = pytestconfig.cache.mkdir("mypy") if pytestconfig.cache else folder / "cache"
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={cache}"]
    command += ["--no-color-output", "--no-error-summary"]
    done = subprocess.run(
        [*command, str(RIGHT), str(WRONG)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=HERE.parent.parent,
        env={**os.environ, "MYPYPATH": "", "PYTHONPATH": ""},
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_a_script_that_uses_every_public_name_has_no_type_errors(found: list[str]) -> None:
    assert [line for line in found if RIGHT.name in line] == []


def test_each_mistake_is_found_and_nothing_else(found: list[str]) -> None:
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    expected = {
        (number, code)
        for number, line in enumerate(lines, 1)
        if "# expect: " in line
        for code in line.split("# expect: ")[1].split()
    }
    matches = [re.search(rf"{WRONG.name}:(\d+): error: .*\[([a-z-]+)\]$", line) for line in found if WRONG.name in line]
    assert {(int(match[1]), match[2]) for match in matches if match} == expected


def test_the_script_runs(chat_folder: Path, tmp_path: Path) -> None:
    user_script.main(chat_folder, make_reranker(tmp_path / "ranker"), tmp_path)


def test_the_script_uses_every_public_name() -> None:
    text = RIGHT.read_text(encoding="utf-8")
    methods = [name for kind in (bough.Model, bough.Runner, bough.Chat) for name in vars(kind) if not name.startswith("_")]
    internal = {"runtime", "begin", "close"}
    assert [name for name in bough.__all__ if not re.search(rf"\b{name}\b", text)] == []
    assert [name for name in methods if f".{name}" not in text and name not in internal] == []
    assert set(bough.__all__) <= set(dir(bough))


def test_the_options_are_the_settings_and_the_sampling_parameters() -> None:
    assert {each.name for each in fields(Settings)} - set(bough.LoadOptions.__annotations__) == OF_SERVERS | {"model"}
    assert set(bough.LoadOptions.__annotations__) <= {each.name for each in fields(Settings)}
    assert set(bough.SamplingOptions.__annotations__) == {each.name for each in fields(SamplingParams)}
