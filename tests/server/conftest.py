"""Servers that tests share: one of the default model for all of them, and small ones with other settings.

`pytest tests/server --server-engine mlx` runs them all on MLX, `pytest tests/server/apis --server-replicas 2` the APIs on
Ray: over so many replicas of the default model, and over three of small ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from bough.models import ModelFiles
from tests.server.servers import Server, StartServer, make_chat_folder, running


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
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a server of the tiny model with the given settings, once for each set of them; all end with the tests."""
    started: dict[tuple[tuple[str, str], ...], Server] = {}
    with ExitStack() as servers:

        def start(**settings: Any) -> Server:
            key = tuple(sorted((name, str(value)) for name, value in settings.items()))
            if key not in started:
                folder = tmp_path_factory.mktemp("tiny_server")
                chosen = (
                    {"data_folder": folder / "data"} | ({"replicas": 3} if "BOUGH_RAY" in os.environ else {}) | settings
                )
                started[key] = servers.enter_context(running(str(tiny_model), folder, **chosen))
            return started[key]

        yield start


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, for the default model."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made
