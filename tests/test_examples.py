"""The examples run, and reuse what they say that they reuse."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bough.models import ModelFiles
from tests.server.in_process import make_words_folder, serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CELLS: list[dict[str, Any]] = [
    cell
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


@dataclass(frozen=True)
class Row:
    """A row of the table that an example ends with."""

    prompts: int
    reused: int
    computed: int


@pytest.mark.model
def test_the_tree_of_thoughts_computes_what_its_branches_share_once(smollm2_files: ModelFiles) -> None:
    printed = _run("tree_of_thoughts.py")

    found = re.search(r"^65 requests: ([\d,]+) tokens of prompts, ([\d,]+) reused, ([\d,]+) computed$", printed, re.M)
    assert found is not None, printed
    prompts, reused, computed = (int(number.replace(",", "")) for number in found.groups())
    assert reused + computed == prompts > 64 * 200  # the plan of the town has 200 tokens
    assert reused > 10 * computed
    assert len(re.findall(r"^[1-4]\. .* \((?:[1-9]|10) of 10\)$", printed, re.MULTILINE)) == 4


@pytest.mark.model
def test_agents_call_python_functions_and_compute_their_tools_once(smollm2_files: ModelFiles) -> None:
    printed = _run("agents.py")

    rounds = re.findall(r"(compute|look_up|reply)\(.*\) = .+ \((\d+) of (\d+) tokens reused\)", printed)
    assert [name for name, *_ in rounds].count("reply") == 3 <= len(rounds) <= 9
    counts = sorted((int(reused), int(prompt)) for _, reused, prompt in rounds)
    assert all(reused > prompt / 2 > 100 for reused, prompt in counts[1:])  # the first one computes the tools


@pytest.mark.model
def test_letters_are_classified_by_a_type_in_one_batch(smollm2_files: ModelFiles) -> None:
    printed = _run("classify.py")

    labels = r"Letter\(topic='(?:delay|price|repair)', mood='(?:happy|angry)', urgent=(?:True|False)\)$"
    assert len(re.findall(labels, printed, re.MULTILINE)) == 6
    found = re.search(r"^(\d+) of (\d+) tokens reused$", printed, re.MULTILINE)
    assert found is not None and int(found[1]) > int(found[2]) / 2


def test_an_example_runs_with_a_model_in_a_server(tmp_path: Path) -> None:
    with serving(ModelFiles("tiny", make_words_folder(tmp_path / "tiny")), tmp_path) as server:
        assert "tokens reused" in _run("classify.py", server.url)


@pytest.mark.parametrize("name", ["tree_of_thoughts.py", "agents.py", "classify.py"])
def test_the_short_programs_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.model
def test_map_reduce_computes_its_instruction_once_and_then_only_what_changed(smollm2_files: ModelFiles) -> None:
    printed = _run("map_reduce.py", "--tokens", "8")

    rows = _read_rows(printed, r"(?:instruction|map, one changed|map|reduce) +\d+")
    instruction, mapped, reduced, again = rows.values()
    assert instruction.computed == instruction.prompts > 200
    assert mapped.reused >= 6 * instruction.computed
    assert reduced.reused >= instruction.computed
    assert again.computed < mapped.computed / 10
    assert "In all: " in printed


@pytest.mark.model
def test_the_notebook_runs(smollm2_files: ModelFiles) -> None:
    names: dict[str, Any] = {}
    for cell in CELLS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        saved = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        assert bool(printed.getvalue()) == bool(saved), "run the notebook again, and save it"
    assert names["why"].cached_tokens < 10 < names["answer"].usage.cached_tokens


def test_the_notebook_was_saved_after_a_run_without_errors() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = {output["output_type"] for cell in CELLS for output in cell["outputs"]}
    assert kinds == {"stream", "execute_result"}


def test_the_readme_of_the_examples_names_each_of_them() -> None:
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb|md))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(file.name for file in EXAMPLES.iterdir() if file.is_file() and file.name != "README.md")


def _run(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _read_rows(printed: str, name: str) -> dict[str, Row]:
    """The rows of the table, by their names. In each, what was reused and computed makes up the prompts."""
    found = re.findall(rf"^ *({name}) +([\d,]+) +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    rows = {label: Row(*(int(number.replace(",", "")) for number in numbers)) for label, *numbers in found}
    assert rows and all(row.reused + row.computed == row.prompts for row in rows.values())
    return rows
