"""Servers that tests share: one of the default model, and small ones with other settings, in this process or another.

`pytest tests/server --server-engine mlx` runs them all on MLX, `pytest tests/server/apis --server-replicas 2` the APIs on
Ray: over so many replicas of the default model, and over three of small ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bough.models import ModelFiles
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import Address, Server, StartProcess, StartServer, make_chat_folder, running

Running = TypeVar("Running", bound=Address)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server-engine", help="the engine of the servers under test: torch or mlx")
    parser.addoption("--server-replicas", help="run the servers under test on Ray, with so many replicas")


def pytest_configure(config: pytest.Config) -> None:
    """Every server that a test starts has this process's environment, whichever way it is started."""
    if engine := config.getoption("server_engine", default=None):
        os.environ["BOUGH_ENGINE"] = engine
    if replicas := config.getoption("server_replicas", default=None):
        os.environ |= {"BOUGH_RAY": "local", "BOUGH_REPLICAS": replicas, "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="session")
def server(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, served to every test that asks: leave it as you found it."""
    with running("smollm2", tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer and a chat template, in a folder of its own: it is loaded within a second."""
    return make_chat_folder(tmp_path_factory.mktemp("tiny_model") / "tiny")


@pytest.fixture(scope="session")
def tiny_process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartProcess]:
    """Starts a server of the tiny model with the given settings, once for each set of them; all end with the tests."""

    def start(folder: Path, settings: dict[str, Any]) -> AbstractContextManager[Server]:
        replicas = {"replicas": 3} if "BOUGH_RAY" in os.environ else {}
        return running(str(tiny_model), folder, **({"data_folder": folder / "data"} | replicas | settings))

    with _starting_once(start, tmp_path_factory) as start_once:
        yield start_once


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model without weights, for servers in this process. Its name and its own sampling are those of the tiny one."""
    return ModelFiles("tiny", make_words_folder(tmp_path_factory.mktemp("words_model") / "tiny", do_sample=False))


@pytest.fixture(scope="session")
def tiny_server(
    request: pytest.FixtureRequest, words_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """As `tiny_process`, but in this process and without weights, unless an engine or replicas were asked for."""
    if is_real(request.config):
        yield request.getfixturevalue("tiny_process")
        return
    with _starting_once(lambda folder, settings: serving(words_model, folder, **settings), tmp_path_factory) as start_once:
        yield start_once


def is_real(config: pytest.Config) -> bool:
    """Whether the servers under test were asked to run a real engine."""
    return any(config.getoption(name, default=None) for name in ("server_engine", "server_replicas"))


@contextmanager
def _starting_once(
    start: Callable[[Path, dict[str, Any]], AbstractContextManager[Running]], folders: pytest.TempPathFactory
) -> Iterator[Callable[..., Running]]:
    started: dict[tuple[tuple[str, str], ...], Running] = {}
    with ExitStack() as servers:

        def start_once(**settings: Any) -> Running:
            key = tuple(sorted((name, str(value)) for name, value in settings.items()))
            if key not in started:
                started[key] = servers.enter_context(start(folders.mktemp("tiny_server"), settings))
            return started[key]

        yield start_once
