"""A model in this process, as the command names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bough.cli.backends.local import LocalBackend


def test_a_folder_that_has_the_name_of_a_model_and_is_none_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    runner: Any = SimpleNamespace(name="small")

    assert LocalBackend(runner, "small").model == "small"
    assert LocalBackend(runner, "mine").model == str(tmp_path / "mine")
