"""A runner over a fake engine, and a home of its own for each test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bough.cli.main import app
from bough.config import Settings
from bough.models import ModelFiles, ModelFolder, Tokenizer
from bough.runner import Runner
from bough.runtime import Runtime
from tests.fakes import FakeEngine
from tests.models.tiny_tokenizer import CHATML, byte_level

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def logs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bough serve` in this process sends the log to the standard error; what comes after has its own again."""
    logger = logging.getLogger("bough")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of this test keep models and caches."""
    monkeypatch.setenv("BOUGH_DATA_FOLDER", str(tmp_path / "data"))
    monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.delenv("BOUGH_MODEL", raising=False)
    monkeypatch.delenv("BOUGH_DISK", raising=False)
    return tmp_path


@pytest.fixture
def store(home: Path) -> ModelFolder:
    return ModelFolder(home / "data" / "models")


@pytest.fixture
def invoke(home: Path) -> Invoke:
    """Run the command in this process."""
    return lambda *words, piped="", **options: CliRunner().invoke(app, list(words), input=piped, **options)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return make_runner(tmp_path)


@pytest.fixture
def loads(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`bough run` gets the fake runner; what it asked for is noted here."""
    seen: list[dict[str, Any]] = []

    def load(
        name: str | None = None, *, progress: Any = None, announce: Any = None, advise: Any = None, **settings: Any
    ) -> Runner:
        given = {key: value for key, value in settings.items() if value is not None}
        seen.append(given if name is None else {"name": name, **given})
        return runner

    monkeypatch.setattr("bough.cli.backends.local.load", load)
    monkeypatch.setattr("bough.cli.backends.known_models.is_here", lambda name, settings: name == "tiny")
    return seen


def make_runner(folder: Path, engine: FakeEngine | None = None, template: str | None = CHATML, **settings: Any) -> Runner:
    """A runner over tokens alone."""
    hf = byte_level(template)
    chosen = Settings(data_folder=folder / "data", cache_folder=folder / "cache", **settings)
    files = ModelFiles("tiny", folder)
    return Runner(Runtime(engine or FakeEngine(vocab_size=len(hf)), Tokenizer(hf), chosen, files))


def add_model(store: ModelFolder, name: str) -> ModelFiles:
    with store.making(name) as making:
        (making.folder / "config.json").write_text("{}")
        return making.commit(source="a test", sha256="12ab", num_parameters=134_500_000, quantization="Q4_1")
