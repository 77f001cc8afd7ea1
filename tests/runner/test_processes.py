"""A process that forks, or ends without closing its runner: it ends soon, and its tree is saved and whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.conftest import check_idle
from tests.runner.processes import ENDS, PROMPT, load_from

EXITS = {"exit_by_ctrl_c": "exit 130", "exit_from_a_loop_that_raises": "exit 5"}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(scope="module")
def ended(chat_folder: Path, trees: Path) -> dict[str, str]:
    """How each process ended. They are children of one script, which imports torch once for all."""
    command = [sys.executable, "-m", "tests.runner.processes", str(chat_folder), str(trees)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", [end.__name__ for end in ENDS])
def test_the_process_ends_and_its_tree_is_whole(name: str, ended: dict[str, str], chat_folder: Path, trees: Path) -> None:
    assert ended[name] == EXITS.get(name, "exit 0")
    with load_from(chat_folder, trees / name) as runner:
        assert runner.generate(PROMPT, max_tokens=1).usage.cached_tokens == len(PROMPT) - 1
        check_idle(runner)
